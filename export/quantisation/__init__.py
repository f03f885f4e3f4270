"""How precisely a graph computes and stores its weights, and what quantisation does to a model."""

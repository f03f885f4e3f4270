"""Speculative streams swept: upper layers, streams of a node, and pruning."""

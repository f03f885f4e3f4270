"""Training draft heads: data, self-distillation, losses and the training loop."""

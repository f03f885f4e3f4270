"""Training data: prompts are read, continued by a model and made into batches."""

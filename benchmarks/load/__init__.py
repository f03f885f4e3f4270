"""A real Triton server under load."""

"""How many draft nodes a step verifies."""

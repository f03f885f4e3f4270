"""The demo: a small backbone, its draft head, and the recipe that made both."""

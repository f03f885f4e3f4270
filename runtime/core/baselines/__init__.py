"""Published ways to make a tree, for comparison only."""

"""The shapes of draft trees: all branches of a search, or its best path alone."""

TREE, CHAIN = "tree", "chain"
SHAPES = (TREE, CHAIN)

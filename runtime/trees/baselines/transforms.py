"""All ways from a lattice to a tree by name, for command lines that compare them."""

from runtime.trees.baselines.medusa_tree import medusa_transform
from runtime.trees.baselines.paper_transform import paper_transform
from runtime.trees.baselines.uncollapsed import uncollapsed_search
from runtime.trees.lattice import Transform
from runtime.trees.prefix_search import prefix_search

TRANSFORMS: dict[str, Transform] = {
    "prefix": prefix_search,
    "paper": paper_transform,
    "uncollapsed": uncollapsed_search,
    "medusa": medusa_transform,
}

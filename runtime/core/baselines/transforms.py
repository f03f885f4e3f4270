"""All ways from a lattice to a tree by name, for command lines that compare them."""

from runtime.core.baselines.medusa_tree import medusa_transform
from runtime.core.baselines.paper_transform import paper_transform
from runtime.core.baselines.uncollapsed import uncollapsed_search
from runtime.core.lattice import Transform
from runtime.core.prefix_search import prefix_search

TRANSFORMS: dict[str, Transform] = {
    "prefix": prefix_search,
    "paper": paper_transform,
    "uncollapsed": uncollapsed_search,
    "medusa": medusa_transform,
}

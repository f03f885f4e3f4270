"""All ways from a lattice to a tree by name, for command lines that compare them."""

from collections.abc import Callable

from runtime.trees.baselines.medusa_tree import medusa_transform
from runtime.trees.baselines.paper_transform import paper_transform
from runtime.trees.baselines.uncollapsed import uncollapsed_search
from runtime.trees.prefix_search import prefix_search
from runtime.trees.token_tree import TokenTree

TRANSFORMS: dict[str, Callable[..., TokenTree]] = {
    "prefix": prefix_search,
    "paper": paper_transform,
    "uncollapsed": uncollapsed_search,
    "medusa": medusa_transform,
}

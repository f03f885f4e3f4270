"""What the loop asks of a draft head, and what draft trees are made with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from runtime.core.options import TREE
from runtime.core.token_tree import TokenTree


@dataclass(frozen=True)
class DraftOptions:
    """How many drafts a step verifies, and of which shape.

    num_nodes: draft nodes of a tree, its root not counted, or drafts of a chain
    shape: ``tree`` or ``chain``
    top_k: labels of a frame, or children of a node, that a head returns
    beam_width, min_level_probability: as in ``runtime.core.level_expansion``
    """

    num_nodes: int = 16
    shape: str = TREE
    top_k: int = 16
    beam_width: int = 4
    min_level_probability: float = 0.2


@dataclass(frozen=True)
class Context:
    """New context of a sequence: tokens [A] int64 and their features [A, F*H]."""

    tokens: Tensor
    features: Tensor


class Drafts(Protocol):
    """The drafts of a batch of sequences, each with its own context."""

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        """Read new context and draft after each root; the tree of a sequence that has none is empty.

        contexts: what has come since the last call; A is at least 1 unless the sequence has no root
        num_nodes: drafts of a tree at most; 0 for none
        """
        ...


def shallow(tree: TokenTree, depth: int) -> TokenTree:
    """The nodes of a tree up to a depth."""
    return tree.subset(np.flatnonzero(tree.depths <= depth))

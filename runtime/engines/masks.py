"""Attention masks, written in place into an engine's input buffer. True means: attend."""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True)
def fill_tree_mask(
    mask: NDArray[np.bool_], parents: NDArray[np.int64], prefix_length: int, first: int = 0
) -> None:
    """Write a tree's mask for its nodes from ``first`` on.

    mask [N - first, S]: the row of node i becomes True at the prefix's columns ``[0, prefix_length)``
    and, at ``prefix_length + j``, for i itself and every ancestor j of i.
    Example: parents (-1, 0, 0, 1), prefix_length 1 -> rows 1100 0, 1110 0, 1101 0, 1110 1.
    """
    for node in range(first, parents.size):
        row = mask[node - first]
        row[:prefix_length] = True
        row[prefix_length:] = False
        ancestor = node
        while ancestor >= 0:
            row[prefix_length + ancestor] = True
            ancestor = parents[ancestor]


@njit(cache=True)
def fill_padding_mask(mask: NDArray[np.bool_], first: int, prefix_length: int) -> None:
    """Write the mask of padding: row i of [N, S], from ``first`` on, attends to its own position alone."""
    for node in range(first, mask.shape[0]):
        mask[node] = False
        mask[node, prefix_length + node] = True


@njit(cache=True)
def fill_causal_mask(mask: NDArray[np.bool_], prefix_length: int) -> None:
    """Write a prompt chunk's mask: row i of [N, S] is True up to column prefix_length + i."""
    for row in range(mask.shape[0]):
        mask[row, : prefix_length + row + 1] = True
        mask[row, prefix_length + row + 1 :] = False


def fill_frame_mask(mask: NDArray[np.bool_], length: int, first_frame: int) -> None:
    """Write the mask of T frames: all rows of [T, S] attend to the context and to all frames."""
    mask[:, :length] = True
    mask[:, length:] = False
    mask[:, first_frame : first_frame + mask.shape[0]] = True

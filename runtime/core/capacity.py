"""Positions of a slot in a key/value cache: those of the longest text, and those that passes write behind it.

The exporter fixes the capacities of compiled engines here, and the runtime chooses all others.
"""

from runtime.core.bundle import AUTOREGRESSIVE

# Caches are read in blocks of so many positions.
CAPACITY_MULTIPLE = 8


def target_model_capacity(max_length: int, num_nodes: int, path_length: int) -> int:
    """Positions of the target model: behind the text is a whole tree, or the longest path packed.

    num_nodes: draft nodes of the largest tree, which has a root too
    path_length: nodes of the longest path with its root
    """
    return rounded(max_length + max(num_nodes + 1, path_length))


def drafter_capacity(
    max_length: int, *, padding: int, family: str, num_frames: int, beam_width: int = 0
) -> int:
    """Positions of a draft head: behind the text are the padding of its context, and its frames or nodes.

    padding: tokens by which the context of one sequence may be padded to that of another
    """
    drafts = beam_width * (num_frames - 1) if family == AUTOREGRESSIVE else num_frames
    return rounded(max_length + padding + drafts)


def streaming_capacity(max_length: int, num_nodes: int, num_frames: int) -> int:
    """Positions of a pass with speculative streams: a tree and the streams of all nodes are behind."""
    return rounded(max_length + (num_nodes + 1) * (1 + num_frames))


def rounded(positions: int) -> int:
    """The next multiple of CAPACITY_MULTIPLE."""
    return -(-positions // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

"""What the runtime asks of an engine: one graph with its key/value cache.

The tensors of every graph, by name and shape, are in ``export/graphs/contracts.py`` and in ``bundle.json``.

An engine runs *forward passes*. A pass is a set of static buffers for one shape of inputs: the caller fills
all ``inputs``, sets the attention mask, calls ``run`` and reads ``outputs``. Passes may share memory, so the
outputs of a pass are valid until another pass of the same engine is prepared.

Caches have *slots*, one for each sequence. A pass works on neighbouring slots.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.kv_cache import SlabKVCache

# The block of keys of an engine that does not cut its sums: none ends before it.
UNBROKEN = sys.maxsize


class ForwardPass(Protocol):
    """The buffers of one input shape. ``run`` writes ``outputs`` in place.

    Buffers may be larger than asked for, since an engine may round axes up (``Engine.round_up``): the caller
    fills all of an input and reads the part of an output that it asked for.
    """

    inputs: dict[str, NDArray[np.generic]]
    outputs: dict[str, NDArray[np.generic]]

    def mask_tree(self, parents: Sequence[NDArray[np.int64]], lengths: Sequence[int], first: int = 0) -> None:
        """Let a node of sequence b's tree attend to ``lengths[b]`` positions, its ancestors and itself.

        parents: [N_b] int64 for each sequence, -1 for a node without a parent among the nodes
        first: nodes before this one are in the cache already; the pass holds the others
        Inputs beyond a sequence's nodes are padding, which attends to itself.
        """

    def mask_causal(self, starts: Sequence[int]) -> None:
        """Let input i of sequence b attend to the positions up to its own, ``starts[b] + i``."""

    def mask_frames(self, lengths: Sequence[int], first_frame: Sequence[int]) -> None:
        """Let every frame of sequence b attend to ``lengths[b]`` positions and to all frames.

        first_frame: the position of every sequence's first frame in the cache
        """

    def run(self) -> None: ...

    def features(self, sizes: Sequence[int]) -> "Features":
        """The pass's features: of the first ``sizes[b]`` inputs of sequence b. Empty where there are none."""


class Engine(Protocol):
    """One graph with its KV cache.

    min_rows, row_multiple: a pass computes so many tokens at least, and a multiple of so many, where
        ``round_up`` is asked
    """

    min_rows: int
    row_multiple: int

    @property
    def key_block(self) -> int | None:
        """Positions of a block of keys, by which products cut their sums.

        UNBROKEN where they do not, and None where this is not known.
        """

    @property
    def kv(self) -> SlabKVCache: ...

    def round_up(self, **axes: int) -> dict[str, int]:
        """The axes of the pass that serves these, such as more rows where few would give other bits.

        The batch axis B is never rounded, because the slots behind it belong to other sequences.
        """

    def forward_pass(
        self, extra_outputs: tuple[str, ...] = (), /, *, slot: int = 0, reads: int | None = None, **axes: int
    ) -> ForwardPass:
        """The pass for the given symbolic axes, such as ``B=1, N=17, M=17``.

        extra_outputs: those to bring to the host beside the outputs that the engine always brings
        slot: the first of the B slots that the pass works on
        reads: positions of these slots that the pass reads or writes, if its inputs B and N, ``write_index``
            and the caches say all of what it does to the cache; None for any others
        """


# Makes the engine of a graph for steps on the host, from the arguments of ``ort.make_host_engine``.
MakeHostEngine = Callable[..., Engine]


class Features:
    """Hidden states of the tokens that a pass has read, for each of B sequences."""

    def __init__(self, blocks: Sequence[NDArray[np.float32]]):
        """blocks: [N_b, F*H] float32 for each sequence"""
        self._blocks = list(blocks)

    def select(self, paths: Sequence[NDArray[np.int64]]) -> "Features":
        """Those of the inputs ``paths[b]`` [A_b] of every sequence."""
        return Features([block[path] for block, path in zip(self._blocks, paths, strict=True)])

    def to_host(self) -> list[NDArray[np.float32]]:
        """[A_b, F*H] float32 for each sequence; valid until the next pass of the engine."""
        return self._blocks

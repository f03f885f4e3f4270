"""Draft heads at run time: from what the backbone has just read to a token tree."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.base import Engine
from runtime.trees.lattice import Lattice
from runtime.trees.token_tree import TokenTree

# (lattice, anchor=..., num_nodes=...) -> tree
Transform = Callable[..., TokenTree]


# Context rows that a pass over several sequences takes at most of each: the others are padded to them.
MAX_SHARED_CONTEXT = 16
# Context rows of one sequence that wait for the next draft at most.
MAX_WAITING = 512


class Proposer(Protocol):
    """What the decode loop asks of a draft head. Every sequence has a row, as in the backbone's cache."""

    def reset(self, row: int) -> None:
        """Forget a row's context: it is free, or a new prompt begins."""
        ...

    def move(self, source: int, target: int) -> None:
        """Give a sequence another row; its old one is free."""
        ...

    def observe(self, row: int, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """Take tokens [A] that have just become a row's context, with their features [A, F*H]."""
        ...

    def draft(self, anchors: Sequence[int], num_nodes: int) -> Sequence[Any]:
        """Run the head after the first rows' contexts, for their anchor tokens and ``num_nodes`` drafts each.

        Returns for every row what ``transform`` takes; valid until the next ``draft``.
        """
        ...

    def transform(self, proposal: Any, *, anchor: int, num_nodes: int) -> TokenTree:
        """Turn a proposal into a tree of at most ``num_nodes`` drafts."""
        ...


class NoProposer:
    """Plain decoding: every tree is a lone anchor."""

    def reset(self, row: int) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def observe(self, row: int, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        pass

    def draft(self, anchors: Sequence[int], num_nodes: int) -> Sequence[None]:
        return [None] * len(anchors)

    def transform(self, proposal: Any, *, anchor: int, num_nodes: int) -> TokenTree:
        return TokenTree.root(anchor)


class HeadSlots:
    """What a head's runtime keeps of every row: how much context its cache has, and what waits to be read."""

    def __init__(self, engine: Engine, num_rows: int):
        self.engine = engine
        self._lengths = [0] * num_rows
        self._pending: list[list[Any]] = [[] for _ in range(num_rows)]
        self._num_pending = [0] * num_rows

    def reset(self, row: int) -> None:
        """As ``Proposer.reset``; the cache is given back with the last row."""
        self._lengths[row] = self._num_pending[row] = 0
        self._pending[row] = []
        if not any(self._lengths):
            self.engine.kv.shrink()

    def move(self, source: int, target: int) -> None:
        """As ``Proposer.move``."""
        self.engine.kv.move(source, target, self._lengths[source])
        self._lengths[target] = self._lengths[source]
        self._pending[target], self._num_pending[target] = self._pending[source], self._num_pending[source]
        self.reset(source)


class ParallelProposer(HeadSlots):
    """A head that fills a lattice of frames in one pass: ``ctc``, ``block`` and ``medusa``.

    New features wait until the next ``draft``, which adds them to the head's context cache and
    fills the frames in the same pass; the frames' own cache rows are overwritten next time. A head
    without a cache reads the last of them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_frames: int,
        transform: Transform,
        merges_repeats: bool = True,
        spare_frames: int | None = None,
        num_rows: int = 1,
    ):
        """spare_frames: frames to fill beyond one a draft, for blanks and repeats; None: always all."""
        super().__init__(engine, num_rows)
        self.num_frames = num_frames
        self._spare_frames = spare_frames
        self._transform = transform
        self._merges_repeats = merges_repeats

    def observe(self, row: int, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        # Rows that wait long, as while nothing is drafted, are read in passes of a good size.
        if self._num_pending[row] >= MAX_WAITING:
            self._read(row, self._take(row))
        self._pending[row].append(features.copy())
        self._num_pending[row] += features.shape[0]

    def draft(self, anchors: Sequence[int], num_nodes: int) -> list[Lattice]:
        rows = range(len(anchors))
        if not all(self._pending[row] for row in rows):
            raise RuntimeError("draft() needs features: call observe() first")
        features = [self._take(row) for row in rows]
        if len(rows) > 1:
            for row in rows:
                if features[row].shape[0] > MAX_SHARED_CONTEXT:
                    self._read(row, features[row][:-1])
                    features[row] = features[row][-1:]
        wanted = self.num_frames if self._spare_frames is None else num_nodes + self._spare_frames
        return self._run(0, features, anchors, min(wanted, self.num_frames))

    def transform(self, proposal: Lattice, *, anchor: int, num_nodes: int) -> TokenTree:
        return self._transform(proposal, anchor=anchor, num_nodes=num_nodes)

    def _take(self, row: int) -> NDArray[np.float32]:
        """The features that wait in a row."""
        waiting: list[NDArray[np.float32]] = self._pending[row]
        self._pending[row], self._num_pending[row] = [], 0
        return waiting[0] if len(waiting) == 1 else np.concatenate(waiting)

    def _read(self, row: int, features: NDArray[np.float32]) -> None:
        """Add context without drafting."""
        self._run(row, [features], [0], self.num_frames if self._spare_frames is None else 1)

    def _run(
        self, first: int, features: Sequence[NDArray[np.float32]], anchors: Sequence[int], num_frames: int
    ) -> list[Lattice]:
        """One pass over the rows from ``first`` on, their context padded to the longest.

        The frames follow the padding in the cache, which they do not see; the next pass overwrites both.
        """
        widest = max(rows.shape[0] for rows in features)
        starts = self._lengths[first : first + len(features)]
        # As for the backbone: room for any pass, so that the cache grows with the texts alone.
        end = max(starts) + max(widest, MAX_SHARED_CONTEXT) + self.num_frames
        self.engine.kv.reserve(end, first + len(features))
        step = self.engine.step(row=first, B=len(features), A=widest, T=num_frames)
        inputs = step.inputs
        for row, (start, new, anchor) in enumerate(zip(starts, features, anchors, strict=True)):
            count = new.shape[0]
            length = start + count
            inputs["features"][row, :count] = new
            inputs["context_position_ids"][row, :count] = np.arange(start, length)
            inputs["context_position_ids"][row, count:] = start
            inputs["frame_position_ids"][row] = np.arange(length, length + num_frames)
            if "anchor_ids" in inputs:
                inputs["anchor_ids"][row, 0] = anchor
            if "attn_mask" in inputs:
                # Every frame sees the whole context and all frames that are drafted.
                mask = inputs["attn_mask"][row, 0]
                mask[:, :length] = True
                mask[:, length:] = False
                mask[:, start + widest : start + widest + num_frames] = True
                inputs["write_index"][row] = start
            self._lengths[first + row] = length
        step.run()
        return [
            Lattice.of_outputs(
                {name: array[row] for name, array in step.outputs.items()},
                merges_repeats=self._merges_repeats,
            )
            for row in range(len(features))
        ]

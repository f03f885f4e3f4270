"""Draft heads at run time: from what the backbone has just read to a token tree."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Engine
from runtime.lattice import Lattice
from runtime.tree import TokenTree

# (lattice, anchor=..., num_nodes=...) -> tree
Transform = Callable[..., TokenTree]


class Drafter(Protocol):
    """What the decode loop asks of a draft head."""

    def reset(self) -> None:
        """Forget the context: a new prompt begins."""
        ...

    def observe(self, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """Take tokens [A] that have just become context, with their features [A, F*H]."""
        ...

    def draft(self, anchor: int) -> Any:
        """Run the head after the context for the anchor token; returns what ``transform`` takes."""
        ...

    def transform(self, proposal: Any, *, anchor: int, num_nodes: int) -> TokenTree:
        """Turn a proposal into a tree of at most ``num_nodes`` drafts."""
        ...


class NoDrafter:
    """Plain decoding: every tree is a lone anchor."""

    def reset(self) -> None:
        pass

    def observe(self, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        pass

    def draft(self, anchor: int) -> None:
        return None

    def transform(self, proposal: Any, *, anchor: int, num_nodes: int) -> TokenTree:
        return TokenTree.root(anchor)


class LatticeDrafter:
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
    ):
        self.engine = engine
        self.num_frames = num_frames
        self._transform = transform
        self._merges_repeats = merges_repeats
        self._frames = np.arange(num_frames)
        self._length = 0
        self._pending: NDArray[np.float32] | None = None

    def reset(self) -> None:
        self.engine.kv.shrink()
        self._length = 0
        self._pending = None

    def observe(self, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        if self._pending is not None:
            # Two calls without a draft between: a prompt read in chunks.
            self._run(self._pending, anchor=0)
        self._pending = features.copy()

    def draft(self, anchor: int) -> Lattice:
        if self._pending is None:
            raise RuntimeError("draft() needs features: call observe() first")
        lattice = self._run(self._pending, anchor)
        self._pending = None
        return lattice

    def transform(self, proposal: Lattice, *, anchor: int, num_nodes: int) -> TokenTree:
        return self._transform(proposal, anchor=anchor, num_nodes=num_nodes)

    def _run(self, features: NDArray[np.float32], anchor: int) -> Lattice:
        start, count = self._length, features.shape[0]
        length = start + count
        end = length + self.num_frames
        self.engine.kv.reserve(end)
        step = self.engine.step(B=1, A=count)
        step.inputs["features"][0] = features
        step.inputs["context_position_ids"][0] = np.arange(start, length)
        np.add(self._frames, length, out=step.inputs["frame_position_ids"][0])
        if "anchor_ids" in step.inputs:
            step.inputs["anchor_ids"][0, 0] = anchor
        if "attn_mask" in step.inputs:
            # Every frame sees the whole context and all frames, which follow it in the cache.
            mask = step.inputs["attn_mask"][0, 0]
            mask[:, :end] = True
            mask[:, end:] = False
            step.inputs["write_index"][0] = start
        step.run()
        self._length = length
        found = {name: array[0] for name, array in step.outputs.items()}
        return Lattice.of_outputs(found, merges_repeats=self._merges_repeats)

"""Parallel draft heads at run time: one pass fills a lattice of frames, a search makes it a tree."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.lattice import Lattice, Search
from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.base import HeadSlots, PendingContext
from runtime.engines.protocol import Engine
from runtime.engines.recorder import Recorder

# A pass over several sequences reads at most this many new tokens of each, because the others are padded to
# them. A sequence with more reads all but its last in a pass of its own.
MAX_SHARED_CONTEXT = 16


class ParallelProposer(HeadSlots):
    """``ctc``, ``block`` and ``medusa`` heads, and streams that draft in a pass of their own.

    New features wait until the next ``propose``, which adds them to the head's context cache and fills the
    frames in the same pass. The frames' own cache positions are overwritten by the next pass. A head without
    a cache reads the last of the features.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_frames: int,
        search: Search,
        merges_repeats: bool = True,
        spare_frames: int | None = None,
        max_num_seqs: int = 1,
    ):
        """spare_frames: frames to fill beyond one for each node, for blanks and repeats; None fills all"""
        super().__init__(engine, max_num_seqs)
        self.num_frames = num_frames
        self._spare_frames = spare_frames
        self._search = search
        self._merges_repeats = merges_repeats

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        lattices = self._draft(last_tokens, num_nodes)
        recorder.mark("draft")
        return [
            self._search(lattice, root_token=token, num_nodes=num_nodes)
            for lattice, token in zip(lattices, last_tokens, strict=True)
        ]

    def _draft(self, last_tokens: Sequence[int], num_nodes: int) -> list[Lattice]:
        """The first slots' lattices, with as many frames as ``num_nodes`` drafts can use."""
        slots = range(len(last_tokens))
        if len(slots) > 1:
            for slot in slots:
                if self._pending[slot].num_tokens > MAX_SHARED_CONTEXT:
                    self.read_all_but_last(slot)
        features = [self.unread(slot)[1] for slot in slots]
        wanted = self.num_frames if self._spare_frames is None else num_nodes + self._spare_frames
        lattices = self._run(0, features, last_tokens, min(wanted, self.num_frames))
        for slot in slots:
            self._pending[slot] = PendingContext()
        return lattices

    def _read(
        self, slot: int, tokens: NDArray[np.int64], features: NDArray[np.float32], following: int
    ) -> None:
        """Add context without drafting."""
        self._run(slot, [features], [0], self.num_frames if self._spare_frames is None else 1)

    def _run(
        self, first: int, features: Sequence[NDArray[np.float32]], last_tokens: Sequence[int], num_frames: int
    ) -> list[Lattice]:
        """One pass over the slots from ``first`` on, their context padded to the longest.

        In the cache the frames follow the padding, which they do not see; the next pass overwrites both.
        """
        longest = max(block.shape[0] for block in features)
        axes = self.engine.round_up(B=len(features), A=longest, T=num_frames)
        width, frames = axes["A"], axes["T"]
        starts = self._lengths[first : first + len(features)]
        lengths = [start + block.shape[0] for start, block in zip(starts, features, strict=True)]
        # Room for the usual pass is always reserved, so that the cache grows with the texts alone.
        end = max(starts) + max(width, MAX_SHARED_CONTEXT) + max(frames, self.num_frames)
        make_room = self.engine.kv.reserve if first else self.engine.kv.fit
        make_room(end, first + len(features))
        forward = self.engine.forward_pass(slot=first, **axes)
        inputs = forward.inputs
        for index, (start, length, block) in enumerate(zip(starts, lengths, features, strict=True)):
            count = block.shape[0]
            inputs["features"][index, :count] = block
            inputs["features"][index, count:] = 0
            inputs["context_position_ids"][index, :count] = np.arange(start, length)
            inputs["context_position_ids"][index, count:] = start
            inputs["frame_position_ids"][index] = np.arange(length, length + frames)
        if "anchor_ids" in inputs:
            inputs["anchor_ids"][:, 0] = last_tokens
        if "attn_mask" in inputs:
            inputs["write_index"][:] = starts
            forward.mask_frames(lengths, [start + width for start in starts])
        forward.run()
        self._lengths[first : first + len(features)] = lengths
        return [
            Lattice.of_outputs(
                {name: array[index] for name, array in forward.outputs.items()},
                merges_repeats=self._merges_repeats,
            )
            for index in range(len(features))
        ]

"""Speculative streams on the host: the pass that verifies a tree also drafts the lattices for the next one.

``StreamTargetModel`` verifies trees and returns a lattice after every node that it keeps. ``StreamProposer``
holds the lattice after each sequence's last accepted node and searches the next tree in it.

The graph prunes a tree to its ``kept_nodes`` most probable drafts before its upper layers; only a kept draft
can be accepted. Its transition and its fused frames, if it has any, take the most probable token for the
anchor. Where another token is drawn, the drafts after it are worse, and the text stays the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.lattice import Lattice, Search
from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.base import Proposer, swap_entries
from runtime.decode.target_model import USUAL_NODES, TargetModel, VerifyOutput, extra_outputs
from runtime.engines.protocol import Engine, Features, ForwardPass
from runtime.engines.recorder import Recorder


class StreamFeatures(Features):
    """The lattices that a pass has drafted, in the place that features have for other heads.

    tables: of all lattices by name, each [B, M, ...]
    kept: [B, M] int64, the nodes that they follow
    places: of every sequence, the one of its M lattices that follows its last token
    """

    def __init__(
        self, tables: Mapping[str, NDArray[Any]], kept: NDArray[np.int64], places: Sequence[int]
    ) -> None:
        super().__init__([np.empty((0, 0), np.float32)] * len(places))
        self._tables = tables
        self._kept = kept
        self._places = places

    def select(self, paths: Sequence[NDArray[np.int64]]) -> "StreamFeatures":
        places = [int(kept.searchsorted(path[-1])) for kept, path in zip(self._kept, paths, strict=True)]
        return StreamFeatures(self._tables, self._kept, places)

    def lattice(self, index: int, *, merges_repeats: bool) -> Lattice:
        """A copy of the lattice after the last token of sequence ``index``."""
        place = self._places[index]
        tables = {name: array[index, place].copy() for name, array in self._tables.items()}
        return Lattice.of_outputs(tables, merges_repeats=merges_repeats)


class StreamTargetModel(TargetModel):
    """The target model with speculative streams.

    num_frames: streams of a node
    kept_nodes: drafts of a tree that pass the upper layers; None for all
    """

    def __init__(self, engine: Engine, *, num_frames: int, kept_nodes: int | None = None):
        super().__init__(engine)
        # A logit would start streams, too.
        self.scores_prompts = False
        self.num_frames = num_frames
        self.kept_nodes = kept_nodes

    def prefill(
        self, token_ids: NDArray[np.int64], start: int, *, slot: int = 0, logits: bool = False
    ) -> VerifyOutput:
        count = token_ids.size
        # All tokens are kept, and only the last one starts streams.
        axes = self.engine.round_up(B=1, N=count, E=1, K=count, M=1)
        self.engine.kv.reserve(start + axes["N"] + self.num_frames, slot + 1)
        forward = self.engine.forward_pass(extra_outputs(logits), slot=slot, **axes)
        inputs = forward.inputs
        inputs["input_ids"][0] = token_ids[-1]
        inputs["input_ids"][0, :count] = token_ids
        inputs["position_ids"][0] = start
        inputs["position_ids"][0, :count] = np.arange(start, start + count)
        inputs["write_index"][0] = start
        inputs["parents"][:] = 0
        inputs["scored_indices"][:] = 0
        inputs["kept_places"][:] = np.arange(axes["K"])
        inputs["stream_indices"][:] = count - 1
        forward.mask_causal([start])
        forward.run()
        return _output(forward, places=[0], prunes=False)

    def verify(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], *, logits: bool, recorder: Recorder
    ) -> VerifyOutput:
        sizes = [len(tree) for tree in trees]
        count = max(sizes)
        kept = count if self.kept_nodes is None else min(self.kept_nodes + 1, count)
        # Without pruning nobody reads what the early exit gives.
        scored = count if kept < count else 1
        axes = self.engine.round_up(B=len(trees), N=count, E=scored, K=kept, M=kept)
        end = max(lengths) + max(axes["N"], USUAL_NODES) + axes["M"] * self.num_frames
        self.engine.kv.fit(end, len(trees))
        forward = self.engine.forward_pass(extra_outputs(logits), **axes)
        inputs = forward.inputs
        inputs["write_index"][:] = lengths
        inputs["scored_indices"][:] = np.arange(axes["E"])
        inputs["kept_places"][:] = np.arange(axes["K"])
        inputs["stream_indices"][:] = np.arange(axes["M"])
        for index, (tree, length, size) in enumerate(zip(trees, lengths, sizes, strict=True)):
            # Padding, which sees itself alone, is kept last; nobody reads what comes of it.
            inputs["input_ids"][index] = tree.tokens[0]
            inputs["input_ids"][index, :size] = tree.tokens
            inputs["position_ids"][index] = length
            np.add(tree.depths, length, out=inputs["position_ids"][index, :size])
            inputs["parents"][index] = 0
            if scored > 1:
                inputs["parents"][index, :size] = tree.parents
        forward.mask_tree([tree.parents for tree in trees], lengths)
        recorder.mark("search")
        forward.run()
        recorder.mark("verify")
        return _output(forward, places=[0] * len(trees), prunes=True)


def _output(forward: ForwardPass, *, places: Sequence[int], prunes: bool) -> VerifyOutput:
    """prunes: whether nodes may have been dropped, as of a tree; a prompt's tokens are all kept"""
    tables: dict[str, NDArray[Any]] = dict(forward.outputs)
    kept, next_tokens, logits = (
        tables.pop("kept_nodes"),
        tables.pop("next_tokens"),
        tables.pop("logits", None),
    )
    features = StreamFeatures(tables, kept, places)
    return VerifyOutput(next_tokens, logits, features, kept if prunes else None)


class StreamProposer(Proposer):
    """Searches the lattices of the last pass, of which every slot has one for its next tree.

    It saves no context, since the streams' is the target model's, and loads none: the first lattice comes
    with the rest of the prompt.
    """

    def __init__(self, *, search: Search, merges_repeats: bool, max_num_seqs: int = 1):
        self._search = search
        self._merges_repeats = merges_repeats
        self._lattices: list[Lattice | None] = [None] * max_num_seqs

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        assert isinstance(features, StreamFeatures)
        for index, slot in enumerate(slots):
            self._lattices[slot] = features.lattice(index, merges_repeats=self._merges_repeats)

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        recorder.mark("draft")
        trees = []
        for lattice, token in zip(self._lattices, last_tokens, strict=False):
            if lattice is None:
                raise RuntimeError("a step needs a lattice: call prefill() first")
            trees.append(self._search(lattice, root_token=token, num_nodes=num_nodes))
        return trees

    def swap(self, first: int, second: int) -> None:
        swap_entries(self._lattices, first, second)

    def release(self, slot: int) -> None:
        self._lattices[slot] = None

"""Speculative streams on the host: the pass that verifies a tree also drafts the lattices for the next one.

Two parts of ``runtime.decode.step.HostStep`` differ from other heads'. ``StreamTargetModel`` verifies trees
and returns a lattice after every node that it keeps. ``StreamProposer`` holds the lattice after each
sequence's last accepted node and searches the next tree in it, so it needs no pass of its own.

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
from runtime.decode.proposers.base import NOTHING, swap_entries
from runtime.decode.target_model import USUAL_NODES, TargetModel, VerifyOutput, extra_outputs
from runtime.engines.protocol import Engine, Features, ForwardPass
from runtime.engines.recorder import Recorder

# What a pass returns besides the tables of its lattices.
KEPT_NODES, NEXT_TOKENS, LOGITS = "kept_nodes", "next_tokens", "logits"


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
    outputs: Mapping[str, NDArray[Any]] = forward.outputs
    own = (KEPT_NODES, NEXT_TOKENS, LOGITS)
    tables = {name: array for name, array in outputs.items() if name not in own}
    kept = outputs[KEPT_NODES]
    return VerifyOutput(
        outputs[NEXT_TOKENS],
        outputs.get(LOGITS),
        StreamFeatures(tables, kept, places),
        kept if prunes else None,
    )


class StreamProposer:
    """The ``Proposer`` that searches the lattices of the last pass. Every slot has one for its next tree."""

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
        return [self._tree(slot, token, num_nodes) for slot, token in enumerate(last_tokens)]

    def _tree(self, slot: int, token: int, num_nodes: int) -> TokenTree:
        lattice = self._lattices[slot]
        if lattice is None:
            raise RuntimeError("a step needs a lattice: call prefill() first")
        return self._search(lattice, root_token=token, num_nodes=num_nodes)

    def swap(self, first: int, second: int) -> None:
        """As ``Proposer.swap``."""
        swap_entries(self._lattices, first, second)

    def save_context(self, slot: int, start: int, end: int) -> NDArray[np.float32]:
        """As ``Proposer.save_context``: the streams' own context is the target model's."""
        return NOTHING

    def load_context(
        self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[NDArray[np.float32]]
    ) -> None:
        """As ``Proposer.load_context``: the first lattice comes with the rest of the prompt."""

    def release(self, slot: int) -> None:
        """As ``Proposer.release``."""
        self._lattices[slot] = None

"""One decode step with speculative streams: the pass that verifies a tree also drafts the next one.

search     lattice of each slot   last tokens      -> a TokenTree for each sequence
verify     target model, one pass trees            -> kept nodes, next tokens and a lattice of each
accept     Acceptor               kept sub-tree    -> Acceptance: path, bonus token
commit     KV cache               paths            -> accepted positions packed, the last node's lattice kept

The graph prunes a tree to its ``kept_nodes`` most probable drafts before its upper layers; only a kept draft
can be accepted. Its transition and its fused frames, if there are any, take the most probable token for the
anchor; where another one is drawn, the drafts after it are worse, and the text is what it would be without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.lattice import Lattice, Transform
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance
from runtime.decode.sequence import SequenceState
from runtime.decode.step import StepResult, step_result
from runtime.decode.target_model import DEFAULT_PREFILL_CHUNK_SIZE, USUAL_NODES
from runtime.engines.protocol import Engine
from runtime.engines.recorder import NullRecorder, Recorder

# What a pass says besides the lattice; all else that it brings to the host belongs to that.
KEPT_NODES, NEXT_TOKENS, LOGITS = "kept_nodes", "next_tokens", "logits"


@dataclass(frozen=True)
class StreamingOutput:
    """What a pass says of B sequences; valid until the next one.

    kept_nodes: [B, K] int64, ascending
    next_tokens: [B, M] int64; logits: [B, M, V] float32, None where they were not asked for
    lattices: the tables of the M lattices of every sequence, by name
    """

    kept_nodes: NDArray[np.int64]
    next_tokens: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    lattices: Mapping[str, NDArray[Any]]

    @classmethod
    def of_outputs(cls, outputs: Mapping[str, NDArray[Any]]) -> "StreamingOutput":
        own = (KEPT_NODES, NEXT_TOKENS, LOGITS)
        return cls(
            outputs[KEPT_NODES],
            outputs[NEXT_TOKENS],
            outputs.get(LOGITS),
            {name: array for name, array in outputs.items() if name not in own},
        )

    def logits_of(self, index: int) -> NDArray[np.float32] | None:
        """[M, V] of one sequence, or None."""
        return None if self.logits is None else self.logits[index]

    def lattice(self, index: int, place: int, *, merges_repeats: bool) -> Lattice:
        """A copy of the lattice after one node."""
        tables = {name: array[index, place].copy() for name, array in self.lattices.items()}
        return Lattice.of_outputs(tables, merges_repeats=merges_repeats)


class StreamingStep:
    """The ``StepRunner`` for a graph with speculative streams. Every slot has the lattice for its next tree.

    num_frames: streams of a node
    kept_nodes: drafts of a tree that pass the upper layers; None for all
    """

    tree_sizes: Sequence[int] = ()

    def __init__(
        self,
        engine: Engine,
        *,
        num_frames: int,
        transform: Transform,
        merges_repeats: bool,
        kept_nodes: int | None = None,
        max_num_seqs: int = 1,
        prefill_chunk_size: int = DEFAULT_PREFILL_CHUNK_SIZE,
    ):
        self.engine = engine
        self.num_frames = num_frames
        self.kept_nodes = kept_nodes
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.recorder: Recorder = NullRecorder()
        self._transform = transform
        self._merges_repeats = merges_repeats
        self._lattices: list[Lattice | None] = [None] * max_num_seqs

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        recorder = self.recorder
        recorder.begin()
        lengths = [sequence.length for sequence in sequences]
        recorder.mark("draft")
        trees = [self._tree(slot, sequence.last_token, num_nodes) for slot, sequence in enumerate(sequences)]
        needs_logits = any(sequence.acceptor.needs_logits for sequence in sequences)
        output = self._verify(trees, lengths, needs_logits)

        accepted = [
            self._accept(index, sequence, tree, output)
            for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True))
        ]
        recorder.mark("accept")

        counts = [acceptance.path.size for acceptance in accepted]
        paths = np.zeros((len(accepted), max(counts)), np.int64)
        for index, acceptance in enumerate(accepted):
            paths[index, : acceptance.path.size] = acceptance.path
        self.engine.kv.commit(range(len(accepted)), lengths, paths, counts)
        recorder.mark("commit")
        result = step_result(trees, accepted)
        recorder.end(len(trees), sum(map(len, trees)), int(result.counts.sum()) - len(trees))
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        start, end = sequence.length, sequence.length + num_tokens
        tokens = sequence.prompt[start:end]
        # All tokens are kept, and only the last one starts streams.
        axes = self.engine.round_up(B=1, N=num_tokens, E=1, K=num_tokens, M=1)
        self.engine.kv.reserve(start + axes["N"] + self.num_frames, slot + 1)
        forward = self.engine.forward_pass(_also(sequence.acceptor.needs_logits), slot=slot, **axes)
        inputs = forward.inputs
        inputs["input_ids"][0] = tokens
        inputs["position_ids"][0] = np.arange(start, end)
        inputs["write_index"][0] = start
        inputs["parents"][:] = 0
        inputs["scored_indices"][:] = 0
        inputs["kept_places"][:] = np.arange(num_tokens)
        inputs["stream_indices"][:] = num_tokens - 1
        forward.mask_causal([start])
        forward.run()
        output = StreamingOutput.of_outputs(forward.outputs)
        if end < sequence.prompt.size:
            return None
        self._lattices[slot] = output.lattice(0, 0, merges_repeats=self._merges_repeats)
        # A lone root that is in the cache already: there is nothing to verify, only the first token to draw.
        tree = TokenTree.root(int(tokens[-1]))
        return step_result(
            [tree], [sequence.acceptor.accept(tree, output.next_tokens[0], output.logits_of(0))]
        )

    def move(self, source: int, target: int, length: int) -> None:
        self.engine.kv.move(source, target, length)
        self._lattices[target], self._lattices[source] = self._lattices[source], None

    def release(self, slot: int) -> None:
        self.engine.kv.release(slot)
        self._lattices[slot] = None

    def close(self) -> None:
        """Nothing is to be done: the host's memory goes with the objects that hold it."""

    def _tree(self, slot: int, last_token: int, num_nodes: int) -> TokenTree:
        lattice = self._lattices[slot]
        if not num_nodes:
            return TokenTree.root(last_token)
        if lattice is None:
            raise RuntimeError("a step needs a lattice: call prefill() first")
        return self._transform(lattice, root_token=last_token, num_nodes=num_nodes)

    def _verify(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], needs_logits: bool
    ) -> StreamingOutput:
        """A pass over a tree for each of the first slots, padded to the largest."""
        sizes = [len(tree) for tree in trees]
        count = max(sizes)
        kept = count if self.kept_nodes is None else min(self.kept_nodes + 1, count)
        # Without pruning nobody reads what the early exit gives.
        scored = count if kept < count else 1
        axes = self.engine.round_up(B=len(trees), N=count, E=scored, K=kept, M=kept)
        end = max(lengths) + max(axes["N"], USUAL_NODES) + axes["M"] * self.num_frames
        self.engine.kv.reserve(end, len(trees))
        forward = self.engine.forward_pass(_also(needs_logits), **axes)
        inputs = forward.inputs
        inputs["write_index"][:] = lengths
        inputs["scored_indices"][:] = np.arange(scored)
        inputs["kept_places"][:] = np.arange(kept)
        inputs["stream_indices"][:] = np.arange(kept)
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
        self.recorder.mark("transform")
        forward.run()
        self.recorder.mark("verify")
        return StreamingOutput.of_outputs(forward.outputs)

    def _accept(
        self, index: int, sequence: SequenceState, tree: TokenTree, output: StreamingOutput
    ) -> Acceptance:
        """The accepted path in the numbers of the whole tree; the lattice of its last node is kept."""
        kept = output.kept_nodes[index]
        kept = kept[: np.searchsorted(kept, len(tree))].copy()
        acceptance = sequence.acceptor.accept(
            tree.subset(kept), output.next_tokens[index], output.logits_of(index)
        )
        place = int(acceptance.path[-1])
        self._lattices[index] = output.lattice(index, place, merges_repeats=self._merges_repeats)
        return replace(acceptance, path=kept[acceptance.path])


def _also(logits: bool) -> tuple[str, ...]:
    return (LOGITS,) if logits else ()

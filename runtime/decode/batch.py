"""Sequences that decode together.

Slots of the caches are handed out from 0 on without gaps, since an engine's pass works on neighbours: first
the sequences that decode, behind them at most one whose prompt is being prefilled.
"""

from runtime.decode.budget import NodeBudget
from runtime.decode.sequence import Chunk, SequenceState
from runtime.decode.step import StepResult, StepRunner

# Tokens of a prompt that are scored at a time: each has the logits of a whole vocabulary.
SCORED_CHUNK = 64


class Batch:
    """Sequences that share a runner's passes.

    sequences: those that decode, in the order of their slots
    prefilling: the one whose prompt is being read, if there is one
    """

    def __init__(self, runner: StepRunner):
        self.runner = runner
        self.sequences: list[SequenceState] = []
        self.prefilling: SequenceState | None = None

    @property
    def has_room(self) -> bool:
        """Whether ``admit`` may be called: a slot is free, and no prompt is being read."""
        return self.prefilling is None and len(self.sequences) < self.runner.max_num_seqs

    def clear(self) -> None:
        """Forget all sequences."""
        self.sequences, self.prefilling = [], None
        for slot in range(self.runner.max_num_seqs):
            self.runner.release(slot)

    def admit(self, sequence: SequenceState) -> None:
        """Take a new sequence in; ``prefill`` is next."""
        if not self.has_room:
            raise RuntimeError("admit() needs a free slot, and no other prompt half read")
        self.prefilling = sequence

    def prefill(self, max_tokens: int | None = None) -> Chunk | None:
        """Read the next part of the admitted sequence's prompt, of ``max_tokens`` at most.

        Returns the sequence's first token once the prompt has been read. Unless that ends the sequence, it
        decodes from the next step on.
        """
        sequence, runner = self.prefilling, self.runner
        if sequence is None:
            raise RuntimeError("prefill() needs a sequence: call admit() first")
        chunk_size = min(runner.prefill_chunk_size, max_tokens or runner.prefill_chunk_size)
        if sequence.prompt_scores is not None:
            chunk_size = min(chunk_size, SCORED_CHUNK)
        num_tokens = min(chunk_size, sequence.prompt.size - sequence.length)
        result = runner.prefill(len(self.sequences), sequence, num_tokens)
        sequence.length += num_tokens
        if result is None:
            return None
        self.prefilling = None
        self.sequences.append(sequence)
        return self._append(sequence, result, 0)

    def enter(self, sequence: SequenceState) -> Chunk:
        """Admit a sequence and prefill its whole prompt; returns its first token."""
        self.admit(sequence)
        while True:
            chunk = self.prefill()
            if chunk is not None:
                return chunk

    def step(self, budget: NodeBudget) -> list[tuple[SequenceState, Chunk]]:
        """Run one decode step; returns what it adds to every sequence. Sequences that end leave the batch."""
        sequences = list(self.sequences)
        result = self.runner.step(sequences, budget.num_nodes(len(sequences)), budget.num_verified)
        budget.learn(result)
        for sequence, count in zip(sequences, result.counts.tolist(), strict=True):
            sequence.length += count
        return [(each, self._append(each, result, index)) for index, each in enumerate(sequences)]

    def remove(self, sequence: SequenceState) -> None:
        """Free a sequence's slot, whether it decodes or its prompt is being read."""
        last = len(self.sequences)
        if sequence is self.prefilling:
            self.prefilling = None
        else:
            # The last sequence that decodes fills the gap, and the one that is prefilled follows.
            slot, last = self.sequences.index(sequence), last - 1
            moved = self.sequences.pop()
            if slot != last:
                self.sequences[slot] = moved
                self.runner.move(last, slot, moved.length)
            if self.prefilling is not None:
                self.runner.move(last + 1, last, self.prefilling.length)
                return
        self.runner.release(last)

    def _append(self, sequence: SequenceState, result: StepResult, index: int) -> Chunk:
        tokens = result.tokens[index, : result.counts[index]].tolist()
        chunk = sequence.append(tokens, result.scores[index])
        if chunk.finish_reason:
            self.remove(sequence)
        return chunk

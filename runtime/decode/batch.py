"""Sequences that decode together.

Slots of the caches are handed out from 0 on without gaps, since an engine's pass works on neighbours: first
the sequences that decode, behind them those whose prompts are being read.
"""

import math
import time

from runtime.core.errors import CacheMemoryError
from runtime.decode.budget import NodeBudget
from runtime.decode.prefix_cache import BLOCK_SIZE, PrefixBlock, PrefixCache, block_keys
from runtime.decode.sequence import Chunk, SequenceState
from runtime.decode.step import StepResult, StepRunner

# Tokens of a prompt that are scored at a time: each has the logits of a whole vocabulary.
SCORED_CHUNK = 64


class Batch:
    """Sequences that share a runner's passes."""

    def __init__(self, runner: StepRunner):
        self.runner = runner
        # Where keys and values of sequences are kept for later prompts; None keeps nothing.
        self.prefixes: PrefixCache | None = None
        # Of every slot in use; the first ``_num_decoding`` sequences decode.
        self._slots: list[SequenceState] = []
        self._num_decoding = 0
        # Sequences whose prompts have been read since the last step.
        self._new: list[SequenceState] = []

    @property
    def sequences(self) -> list[SequenceState]:
        """Those that decode, in the order of their slots."""
        return self._slots[: self._num_decoding]

    @property
    def prefilling(self) -> list[SequenceState]:
        """Those whose prompts are being read, in the order of their slots."""
        return self._slots[self._num_decoding :]

    @property
    def has_room(self) -> bool:
        """Whether a slot is free, so that ``admit`` may be called."""
        return len(self._slots) < self.runner.max_num_seqs

    def clear(self) -> None:
        self._slots, self._num_decoding, self._new = [], 0, []
        for slot in range(self.runner.max_num_seqs):
            self.runner.release(slot)

    def admit(self, sequence: SequenceState) -> None:
        """Take a new sequence in, with what is known of its prompt; ``prefill`` is next."""
        if not self.has_room:
            raise RuntimeError("admit() needs a free slot")
        self._slots.append(sequence)
        # It gets the slot in which it can begin to decode. Another one that is half read makes room now,
        # before it grows.
        slot = self._num_decoding
        self._exchange(slot, len(self._slots) - 1)
        known = self._num_known(sequence)
        if known and self.prefixes is not None:
            blocks = self.prefixes.take(sequence.prompt_keys)
            try:
                self.runner.load_blocks(slot, sequence.prompt[:known], blocks)
            except CacheMemoryError:
                return  # the prompt is read from its beginning, until there is no memory for that either
            sequence.length = sequence.num_cached = known
            self.prefixes.num_hit_tokens += known

    def num_unread(self, sequence: SequenceState) -> int:
        """Tokens of a prompt that are still to be read, now or once it has a slot."""
        known = 0 if sequence in self._slots else self._num_known(sequence)
        return sequence.num_unread - known

    def _num_known(self, sequence: SequenceState) -> int:
        """Tokens of a new sequence's prompt that need not be read. Those that are to be scored are."""
        if self.prefixes is None or sequence.prompt_scores is not None:
            return 0
        return max(0, self.prefixes.num_known(sequence.prompt_keys) * BLOCK_SIZE - 1)

    def _keep(self, sequence: SequenceState) -> None:
        """Keep what is in a sequence's cache for later prompts."""
        if self.prefixes is None:
            return
        slot = self._slots.index(sequence)

        def copy(start: int, end: int) -> PrefixBlock | None:
            # The head may have to read for a copy, and lack memory for that. Nobody needs the copy.
            try:
                return self.runner.save_block(slot, start, end)
            except CacheMemoryError:
                return None

        self.prefixes.add(block_keys(sequence.cached_tokens), copy)

    def prefill(self, sequence: SequenceState, max_tokens: int | None = None) -> Chunk | None:
        """Read the next part of an admitted sequence's prompt, of ``max_tokens`` at most.

        Returns the sequence's first token once the prompt has been read. Unless that ends the sequence, it
        decodes from the next step on.
        """
        runner, slot = self.runner, self._slots.index(sequence)
        chunk_size = min(runner.prefill_chunk_size, max_tokens or runner.prefill_chunk_size)
        if sequence.prompt_scores is not None:
            chunk_size = min(chunk_size, SCORED_CHUNK)
        num_tokens = min(chunk_size, sequence.prompt.size - sequence.length)
        result = runner.prefill(slot, sequence, num_tokens)
        sequence.length += num_tokens
        if result is None:
            return None
        self._exchange(self._num_decoding, slot)
        self._num_decoding += 1
        self._new.append(sequence)
        return self._append(sequence, result, 0)

    def enter(self, sequence: SequenceState) -> Chunk:
        """Admit a sequence and prefill its whole prompt; returns its first token."""
        self.admit(sequence)
        while True:
            chunk = self.prefill(sequence)
            if chunk is not None:
                return chunk

    def step(self, budget: NodeBudget) -> list[tuple[SequenceState, Chunk]]:
        """Run one decode step; returns what it adds to every sequence. Sequences that end leave the batch."""
        # Not before, so that nobody's first token waits for the copies.
        for sequence in self._new:
            self._keep(sequence)
        self._new = []
        sequences = self.sequences
        began = time.perf_counter()
        result = self.runner.step(sequences, budget.num_nodes(len(sequences)), budget.num_verified)
        milliseconds = 1000 * (time.perf_counter() - began)
        budget.learn(result, milliseconds)
        for sequence, count in zip(sequences, result.counts.tolist(), strict=True):
            sequence.length += count
        return [(each, self._append(each, result, index)) for index, each in enumerate(sequences)]

    def remove(self, sequence: SequenceState) -> None:
        """Free a sequence's slot, whether it decodes or its prompt is being read."""
        self._keep(sequence)
        if sequence in self._new:
            self._new.remove(sequence)
        slot, last = self._slots.index(sequence), len(self._slots) - 1
        self.runner.release(slot)
        if slot < self._num_decoding:
            # The last sequence that decodes fills the gap, and the last one behind it fills that one's.
            self._num_decoding -= 1
            self._exchange(slot, self._num_decoding, is_free=True)
            slot = self._num_decoding
        self._exchange(slot, last, is_free=True)
        self._slots.pop()

    def _exchange(self, first: int, second: int, *, is_free: bool = False) -> None:
        """Exchange the sequences of two slots.

        is_free: whether the first slot was released, so that nothing of its sequence is kept
        """
        slots = self._slots
        if first != second:
            lengths = (0 if is_free else slots[first].length, slots[second].length)
            self.runner.swap(first, second, lengths)
            slots[first], slots[second] = slots[second], slots[first]

    def _append(self, sequence: SequenceState, result: StepResult, index: int) -> Chunk:
        tokens = result.tokens[index, : result.counts[index]].tolist()
        num_drafts = sum(map(math.isfinite, result.node_log_probs[index].tolist()))
        chunk = sequence.append(tokens, result.scores[index], num_drafts)
        if chunk.finish_reason:
            self.remove(sequence)
        return chunk

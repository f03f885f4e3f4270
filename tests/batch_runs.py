"""Driving a batch by hand: sequences that join, leave and decode together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import SequenceState
from runtime.decoder import SpeculativeDecoder

# A prompt and the options of ``SequenceFactory.make``.
GenerateArguments = tuple[Sequence[int], dict[str, Any]]


class WanderingBudget(FixedBudget):
    """Another number of nodes in every step, now and then none; any number of them is verified."""

    def __init__(self, random: np.random.Generator):
        self._random = random

    def num_nodes(self, num_seqs: int) -> int:
        return int(self._random.choice([0, 1, 3, 8, 12]))

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        return int(self._random.integers(node_log_probs.shape[1] + 1))


def mixed_requests(prompts: Sequence[Sequence[int]]) -> list[GenerateArguments]:
    """Greedy and sampling requests of different lengths."""
    requests = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=index) if index % 3 == 2 else GREEDY
        options = {"max_new_tokens": 5 + 9 * index, "stop_token_ids": (), "sampling": sampling}
        requests.append((prompt, options))
    return requests


def decode_together(
    decoder: SpeculativeDecoder,
    requests: Sequence[GenerateArguments],
    random: np.random.Generator,
    dropped: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Every request's tokens. Requests come in when there is room and chance wants it.

    dropped: those that leave half way
    """
    batch, budget = decoder.batch, WanderingBudget(random)
    sequences = {decoder.new_sequence(prompt, **options): i for i, (prompt, options) in enumerate(requests)}
    found: list[list[int]] = [[] for _ in sequences]
    waiting = list(sequences)
    batch.clear()
    while waiting or batch.prefilling or batch.sequences:
        if waiting and batch.has_room and random.random() < 0.5:
            batch.admit(waiting.pop(0))
        if batch.prefilling and random.random() < 0.7:
            sequence = batch.prefilling[random.integers(len(batch.prefilling))]
            first = batch.prefill(sequence, int(random.integers(1, 40)))
            if first is not None:
                found[sequences[sequence]] += first.token_ids
        if batch.sequences and random.random() < 0.9:
            for sequence, chunk in batch.step(budget):
                found[sequences[sequence]] += chunk.token_ids
        half_read = batch.prefilling
        for sequence in [*batch.sequences, *half_read]:
            index = sequences[sequence]
            if index in dropped and (sequence in half_read or len(found[index]) > 4):
                batch.remove(sequence)
    return found


def steps_together(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], count: int
) -> list[list[list[int]]]:
    """What every step gives every prompt, where all decode ``count`` tokens together with 8 nodes each."""
    batch = decoder.batch
    batch.clear()
    found: dict[SequenceState, list[list[int]]] = {}
    for prompt in prompts:
        sequence = decoder.new_sequence(prompt, max_new_tokens=count, stop_token_ids=())
        batch.admit(sequence)
        first = batch.prefill(sequence)
        assert first is not None
        found[sequence] = [first.token_ids]
    while batch.sequences:
        for sequence, chunk in batch.step(FixedBudget(8)):
            found[sequence].append(chunk.token_ids)
    return list(found.values())

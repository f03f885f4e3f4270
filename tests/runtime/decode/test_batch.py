"""Sequences that decode together give what each gives alone, whoever joins and leaves around them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from runtime.decode.budget import FixedBudget
from runtime.decode.proposers.base import NoProposer, Proposer
from runtime.decode.sequence import SequenceState
from runtime.engines.kv_cache import SlabKVCache
from tests.batch_runs import decode_together, mixed_requests, steps_together
from tests.fake_engines import LANGUAGE
from tests.fake_heads import (
    FakeEagle,
    FakeHydra,
    FakeParallelHead,
    autoregressive_proposer,
    eagle_truth,
    hydra_truth,
    parallel_proposer,
)
from tests.fakes import FakeDecoder, OracleProposer, chunks_of, known_texts

MAX_NUM_SEQS = 4
# All begin alike, because a fake EAGLE does not read the first token. The long one makes the cache grow
# around the others.
PROMPTS = [[5], [5, 80, 81], [5, *range(90, 101)], [5, 7], [5, 9, 9, 9], [5, *range(2, 232)], [5, 66, 65, 64]]
BUCKETS = {"N": (2, 4, 8, 16, 64), "M": (2, 4, 8, 16, 64)}


REQUESTS = mixed_requests(PROMPTS)
SWAP = SlabKVCache.swap


@cache
def expected_texts() -> list[list[int]]:
    """What every request gives alone and without drafts."""
    return [
        LANGUAGE.continuation(prompt, options["max_new_tokens"], options["sampling"])
        for prompt, options in REQUESTS
    ]


MAKE_PROPOSER: dict[str, Callable[[], Proposer]] = {
    "plain": NoProposer,
    "oracle": lambda: OracleProposer(
        known_texts([prompt + text for prompt, text in zip(PROMPTS, expected_texts(), strict=True)]),
        max_num_seqs=MAX_NUM_SEQS,
    ),
    "parallel": lambda: parallel_proposer(
        FakeParallelHead(max_num_seqs=MAX_NUM_SEQS), max_num_seqs=MAX_NUM_SEQS
    ),
    "parallel in buckets": lambda: parallel_proposer(
        FakeParallelHead(max_num_seqs=MAX_NUM_SEQS, buckets={"A": (4, 16, 64), "T": (4, 8)}),
        max_num_seqs=MAX_NUM_SEQS,
    ),
    "eagle": lambda: autoregressive_proposer(
        FakeEagle(eagle_truth(5, 3), 3, max_num_seqs=MAX_NUM_SEQS), 4, max_num_seqs=MAX_NUM_SEQS
    ),
    "hydra": lambda: autoregressive_proposer(
        FakeHydra(hydra_truth(3), 3, 4, max_num_seqs=MAX_NUM_SEQS), 4, max_num_seqs=MAX_NUM_SEQS
    ),
    "hydra++": lambda: autoregressive_proposer(
        FakeHydra(hydra_truth(3), 3, 4, num_layers=1, max_num_seqs=MAX_NUM_SEQS), 4, max_num_seqs=MAX_NUM_SEQS
    ),
}
HEADS = [name for name in MAKE_PROPOSER if name not in ("plain", "oracle")]


@pytest.mark.parametrize("proposer", MAKE_PROPOSER)
@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["exact", "buckets"])
def test_sequences_give_what_each_gives_alone(
    proposer: str, buckets: dict[str, tuple[int, ...]] | None
) -> None:
    for seed in range(2):
        decoder = FakeDecoder(MAKE_PROPOSER[proposer](), max_num_seqs=MAX_NUM_SEQS, buckets=buckets)
        assert decode_together(decoder, REQUESTS, np.random.default_rng(seed)) == expected_texts()


@pytest.mark.parametrize("proposer", MAKE_PROPOSER)
def test_sequences_that_leave_half_way(proposer: str) -> None:
    """On one decoder, so that what they leave behind is in the caches of those that come after."""
    decoder = FakeDecoder(MAKE_PROPOSER[proposer](), max_num_seqs=MAX_NUM_SEQS)
    dropped = frozenset({1, 3, 5})
    for seed in range(2):
        found = decode_together(decoder, REQUESTS, np.random.default_rng(seed), dropped)
        for index, (tokens, whole) in enumerate(zip(found, expected_texts(), strict=True)):
            if index in dropped:
                assert tokens == whole[: len(tokens)]
                assert len(tokens) < len(whole)
            else:
                assert tokens == whole


@pytest.mark.parametrize("proposer", HEADS)
def test_drafts_are_the_same_as_alone(proposer: str) -> None:
    """Not only the text: a batch accepts as much in a step, so its heads have read the same contexts."""
    decoder = FakeDecoder(MAKE_PROPOSER[proposer](), max_num_seqs=MAX_NUM_SEQS)
    single = [[chunk.token_ids for chunk in chunks_of(decoder, prompt, 24)] for prompt in PROMPTS[:3]]
    assert all(max(len(tokens) for tokens in chunks) > 2 for chunks in single)
    assert steps_together(decoder, PROMPTS[:3], 24) == single


def admit(decoder: FakeDecoder, prompt: list[int], count: int = 50) -> SequenceState:
    """A new sequence of the batch, whose prompt has not been read."""
    sequence = decoder.new_sequence(prompt, max_new_tokens=count, stop_token_ids=())
    decoder.batch.admit(sequence)
    return sequence


def test_room() -> None:
    decoder = FakeDecoder(max_num_seqs=2)
    batch = decoder.batch
    first = admit(decoder, [5, 6, 7])
    assert batch.prefill(first, 2) is None
    assert batch.has_room
    second = admit(decoder, [5, 6, 7])
    assert not batch.has_room
    assert batch.prefill(first, 2) is not None
    assert batch.prefill(second) is not None
    with pytest.raises(RuntimeError, match="needs a free slot"):
        admit(decoder, [5, 6, 7])
    batch.remove(first)
    assert batch.sequences == [second]
    assert batch.has_room


def test_a_sequence_that_ends_with_its_first_token_leaves() -> None:
    decoder = FakeDecoder()
    chunk = decoder.batch.prefill(admit(decoder, [5, 6], count=1))
    assert chunk is not None
    assert chunk.finish_reason == "length"
    assert decoder.batch.sequences == []
    assert decoder.batch.has_room


def slots_of_three_and_two() -> tuple[FakeDecoder, OracleProposer]:
    """Sequences of 10, 11 and 12 decode in slots 0 to 2; the prompts of 14 and 13 behind are half read."""
    oracle = OracleProposer(max_num_seqs=5)
    decoder = FakeDecoder(oracle, max_num_seqs=5)
    for token in (10, 11, 12):
        decoder.batch.prefill(admit(decoder, [token, token]))
    for token in (13, 14):
        decoder.batch.prefill(admit(decoder, [token] * 4), 2)
    check_slots(decoder, oracle, [10, 11, 12, 14, 13])
    return decoder, oracle


def check_slots(decoder: FakeDecoder, oracle: OracleProposer, firsts: list[int]) -> None:
    """firsts: the first token of the sequence in every slot, without gaps"""
    assert [context[0] for context in oracle.contexts[: len(firsts)]] == firsts
    assert not any(oracle.contexts[len(firsts) :])
    for slot, first in enumerate(firsts):
        assert decoder.engine.kv.slab[0, slot, 0, :2].tolist() == [[first, 0], [first, 1]]


@pytest.mark.parametrize(
    ("leaving", "firsts"),
    [
        (10, [12, 11, 13, 14]),
        (11, [10, 12, 13, 14]),
        (12, [10, 11, 13, 14]),
        (14, [10, 11, 12, 13]),
        (13, [10, 11, 12, 14]),
    ],
)
def test_slots_have_no_gaps(leaving: int, firsts: list[int]) -> None:
    """The last sequence that decodes fills a gap, and the last one that is half read follows it."""
    decoder, oracle = slots_of_three_and_two()
    batch = decoder.batch
    (sequence,) = (each for each in (*batch.sequences, *batch.prefilling) if each.prompt[0] == leaving)
    batch.remove(sequence)
    check_slots(decoder, oracle, firsts)


@pytest.mark.parametrize(("finished", "firsts"), [(0, [10, 11, 12, 14, 13]), (1, [10, 11, 12, 13, 14])])
def test_prompts_are_read_in_any_order(finished: int, firsts: list[int]) -> None:
    decoder, oracle = slots_of_three_and_two()
    batch = decoder.batch
    assert batch.prefill(batch.prefilling[finished]) is not None
    check_slots(decoder, oracle, firsts)
    assert [len(batch.sequences), len(batch.prefilling)] == [4, 1]


@pytest.mark.parametrize("proposer", HEADS)
def test_caches_are_small_again_once_all_sequences_have_left(proposer: str) -> None:
    made = MAKE_PROPOSER[proposer]()
    decoder = FakeDecoder(made, max_num_seqs=MAX_NUM_SEQS)
    caches = [decoder.engine.kv, made.engine.kv]  # type: ignore[attr-defined]
    sizes = [cache.capacity for cache in caches]
    for prompt in (PROMPTS[5], PROMPTS[1]):
        decoder.batch.prefill(admit(decoder, prompt))
        decoder.batch.step(FixedBudget(4))
    assert decoder.engine.kv.capacity > sizes[0]
    for sequence in list(decoder.batch.sequences):
        decoder.batch.remove(sequence)
    assert [cache.capacity for cache in caches] == sizes


@pytest.mark.parametrize(
    ("fault", "replacement"),
    [
        ("runtime.engines.kv_cache.SlabKVCache.swap", lambda *args: None),
        (
            "runtime.engines.kv_cache.SlabKVCache.swap",
            lambda cache, first, second, lengths: SWAP(cache, first, second - 1, lengths),
        ),
        (
            "runtime.engines.kv_cache.SlabKVCache.swap",
            lambda cache, first, second, lengths: SWAP(cache, first, second, (0, lengths[1])),
        ),
        ("tests.fakes.OracleProposer.swap", lambda *args: None),
        ("runtime.decode.proposers.base.HeadSlots.swap", lambda *args: None),
    ],
    ids=["cache stays", "another slot moves", "one slot moves only", "oracle stays", "head stays"],
)
def test_a_wrong_swap_is_noticed(
    fault: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, replacement)
    decoder = FakeDecoder(
        MAKE_PROPOSER["parallel" if "HeadSlots" in fault else "oracle"](), max_num_seqs=MAX_NUM_SEQS
    )
    try:
        found = [decode_together(decoder, REQUESTS, np.random.default_rng(seed)) for seed in range(3)]
    except (AssertionError, RuntimeError):
        return
    assert any(texts != expected_texts() for texts in found)

"""Rows that decode together give what each gives alone, whoever joins and leaves around them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.base import Drafter
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.batch import Batch, FixedPlan
from runtime.decoding.sampling import SamplingParams
from runtime.decoding.sequence import Row
from runtime.errors import RequestError
from runtime.trees.token_tree import TokenTree

NUM_ROWS = 4
# The long one makes the cache grow around the others.
PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 230, "Q")


class WanderingPlan(FixedPlan):
    """Other rows with another number of drafts in every step, and now and then none at all."""

    def __init__(self, random: np.random.Generator):
        self.random = random

    def drafting(self, rows: Sequence[Row]) -> tuple[int, int]:
        count = self.random.choice([len(rows), self.random.integers(len(rows) + 1)])
        return int(count), int(self.random.choice([0, 1, 3, 8, 12]))


def options_of(index: int) -> dict[str, Any]:
    """Greedy and sampling requests of different lengths."""
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=index) if index % 3 == 2 else SamplingParams()
    return {"max_new_tokens": 5 + 9 * index, "stop_token_ids": (), "sampling": sampling}


def requests_of(decoder: SpeculativeDecoder) -> list[tuple[list[int], dict[str, Any]]]:
    encode = decoder.prompt_tokenizer.encode
    return [(encode(text), options_of(index)) for index, text in enumerate(PROMPTS)]


def alone(directory: Path) -> list[list[int]]:
    decoder = SpeculativeDecoder.from_bundle(directory, method="vanilla", num_threads=1)
    found = []
    for prompt, options in requests_of(decoder):
        found.append([token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids])
    return found


def together(
    decoder: SpeculativeDecoder, random: np.random.Generator, dropped: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Requests come in when there is room and chance wants it; the ``dropped`` leave half way."""
    batch, plan = decoder.batch, WanderingPlan(random)
    requests = requests_of(decoder)
    rows = {decoder.row(prompt, **options): index for index, (prompt, options) in enumerate(requests)}
    found: list[list[int]] = [[] for _ in rows]
    waiting = list(rows)
    batch.clear()
    while waiting or batch.entering or batch.rows:
        if waiting and batch.has_room and random.random() < 0.5:
            batch.admit(waiting.pop(0))
        entering = batch.entering
        if entering is not None and random.random() < 0.7:
            chunk = batch.read_prompt(int(random.integers(1, 40)))
            if chunk is not None:
                found[rows[entering]] += chunk.token_ids
        if batch.rows and random.random() < 0.9:
            for row, chunk in batch.step(plan):
                found[rows[row]] += chunk.token_ids
        for row in [*batch.rows, *([batch.entering] if batch.entering else [])]:
            if rows[row] in dropped and (row is batch.entering or len(found[rows[row]]) > 4):
                batch.remove(row)
    return found


@pytest.fixture(scope="module")
def expected(tiny_bundle_dir: Path) -> list[list[int]]:
    """The backbone is the same in every bundle of this file."""
    return alone(tiny_bundle_dir)


def test_frame_heads(trained_head: Any, expected: list[list[int]]) -> None:
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_rows=NUM_ROWS, num_threads=1)
    for seed in range(3):
        assert together(decoder, np.random.default_rng(seed)) == expected


@pytest.mark.parametrize("drafter_type", ["eagle", "hydra"])
def test_chain_heads(
    drafter_type: str,
    make_tiny_head: Callable[..., Drafter],
    make_tiny_bundle: Callable[..., Path],
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    make_tiny_head(drafter_type).save_pretrained(tmp_path / drafter_type)
    bundle = make_tiny_bundle(tmp_path / drafter_type)
    decoder = SpeculativeDecoder.from_bundle(bundle, num_rows=NUM_ROWS, num_threads=1)
    for seed in range(3):
        assert together(decoder, np.random.default_rng(seed)) == expected


def test_plain_decoding(tiny_bundle_dir: Path, expected: list[list[int]]) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, method="vanilla", num_rows=NUM_ROWS, num_threads=1
    )
    assert together(decoder, np.random.default_rng(0)) == expected


def test_rows_that_leave_half_way(tiny_bundle_dir: Path, expected: list[list[int]]) -> None:
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_rows=NUM_ROWS, num_threads=1)
    for seed in range(4):
        dropped = frozenset({1, 3, 5})
        found = together(decoder, np.random.default_rng(seed), dropped)
        for index, tokens in enumerate(found):
            if index in dropped:
                assert tokens == expected[index][: len(tokens)]
                assert len(tokens) < len(expected[index])
            else:
                assert tokens == expected[index]


def test_drafts_are_the_same_as_alone(trained_head: Any) -> None:
    """Not only the text: a batch accepts as much in a step, so its heads have read the same contexts."""
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_rows=3, num_threads=1)
    prompts = [decoder.prompt_tokenizer.encode(text) for text in trained_head.prompts[:3]]
    single = []
    for prompt in prompts:
        chunks = list(decoder.stream(prompt, max_new_tokens=24, stop_token_ids=()))
        single.append([chunk.token_ids for chunk in chunks])
    assert max(len(tokens) for chunks in single for tokens in chunks) > 2
    batch = decoder.batch
    batch.clear()
    rows = [decoder.row(prompt, max_new_tokens=24, stop_token_ids=()) for prompt in prompts]
    found: dict[Row, list[list[int]]] = {}
    for row in rows:
        batch.admit(row)
        first = batch.read_prompt()
        assert first is not None
        found[row] = [first.token_ids]
    while batch.rows:
        for row, chunk in batch.step(FixedPlan(8)):
            found[row].append(chunk.token_ids)
    assert [found[row] for row in rows] == single


def test_context_that_has_waited(trained_head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no draft has read yet is read in passes of its own, and gives the drafts it would have given."""
    monkeypatch.setattr("runtime.drafter.MAX_WAITING", 24)
    random = np.random.default_rng(0)
    contexts = [random.integers(2, 250, size) for size in (90, 30, 3)]

    def draft(decoder: SpeculativeDecoder, contexts: list[Any], size: int) -> list[TokenTree]:
        backbone, drafter = decoder.batch.backbone, decoder.batch.drafter
        decoder.batch.clear()
        for row, tokens in enumerate(contexts):
            for start in range(0, tokens.size, size):
                chunk = tokens[start : start + size]
                drafter.observe(row, chunk, backbone.prefill(chunk, start, row=row).features)
        proposals = drafter.draft([5] * len(contexts), 10)
        return [drafter.transform(proposal, anchor=5, num_nodes=10) for proposal in proposals]

    single = SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1)
    batched = SpeculativeDecoder.from_bundle(trained_head.bundle, num_rows=3, num_threads=1)
    expected = [draft(single, [tokens], 500)[0] for tokens in contexts]
    for tree, other in zip(draft(batched, contexts, 5), expected, strict=True):
        assert np.array_equal(tree.tokens, other.tokens)
        np.testing.assert_allclose(tree.log_probs, other.log_probs, rtol=1e-3, atol=1e-4)


def test_places(tiny_bundle_dir: Path) -> None:
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_rows=2, num_threads=1)
    batch: Batch = decoder.batch
    batch.clear()
    rows = [decoder.row([5, 6, 7], max_new_tokens=50, stop_token_ids=()) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"call admit\(\) first"):
        batch.read_prompt()
    batch.admit(rows[0])
    with pytest.raises(RuntimeError, match="needs a free row"):
        batch.admit(rows[1])
    assert batch.read_prompt(2) is None
    assert batch.read_prompt(2) is not None
    batch.admit(rows[1])
    batch.read_prompt()
    assert not batch.has_room
    with pytest.raises(RuntimeError, match="needs a free row"):
        batch.admit(rows[2])
    batch.remove(rows[0])
    assert batch.rows == [rows[1]]
    assert batch.has_room


@pytest.mark.parametrize("num_rows", [0, 100_000])
def test_bad_number_of_rows(tiny_bundle_dir: Path, num_rows: int) -> None:
    with pytest.raises(RequestError, match="num_rows: must be between 1 and"):
        SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_rows=num_rows)

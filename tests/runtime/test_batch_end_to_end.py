"""Sequences that decode together on the real engine give what each gives alone, with every head family."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.build_engines import build
from runtime.core.token_tree import TokenTree
from runtime.decode.budget import AdaptiveBudget
from runtime.decode.step import HostStep
from runtime.decode.step_times import MAX_NODES
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import NullRecorder
from runtime.serve.scheduler import Scheduler
from tests.batch_runs import GenerateArguments, decode_together, mixed_requests, steps_together
from tests.fakes import chunks_of, token_ids
from tests.step_costs import corrected_ms

MAX_NUM_SEQS = 4
# The long one makes the cache grow around the others.
PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 230, "Q")


def requests_of(decoder: SpeculativeDecoder) -> list[GenerateArguments]:
    return mixed_requests([decoder.prompt_tokenizer.encode(text) for text in PROMPTS])


@pytest.fixture(scope="module")
def expected(tiny_bundle_dir: Path) -> list[list[int]]:
    """The target model is the same in every bundle of this file."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    return [token_ids(list(decoder.stream(prompt, **options))) for prompt, options in requests_of(decoder)]


def test_parallel_heads(trained_head: Any, expected: list[list[int]]) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        trained_head.bundle, max_num_seqs=MAX_NUM_SEQS, num_threads=1, num_nodes=8
    )
    assert decode_together(decoder, requests_of(decoder), np.random.default_rng(0)) == expected


@pytest.mark.parametrize("drafter_type", ["eagle", "hydra"])
def test_autoregressive_heads(
    drafter_type: str,
    tiny_model_dir: Path,
    tiny_bundle_dir: Path,
    level_bundle_of: Callable[[str], Path],
    copied_graphs: Callable[..., AbstractContextManager[None]],
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    with_steps = level_bundle_of(drafter_type)
    with copied_graphs(backbone=tiny_bundle_dir, drafter=with_steps):
        build(tiny_model_dir, tmp_path / "bundle", drafter_dir=with_steps.parent / "head")
    decoder = SpeculativeDecoder.from_bundle(
        tmp_path / "bundle", max_num_seqs=MAX_NUM_SEQS, num_threads=1, num_nodes=8
    )
    assert decode_together(decoder, requests_of(decoder), np.random.default_rng(0)) == expected


def test_plain_decoding(tiny_bundle_dir: Path, expected: list[list[int]]) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, method="plain", max_num_seqs=MAX_NUM_SEQS, num_threads=1
    )
    assert decode_together(decoder, requests_of(decoder), np.random.default_rng(0)) == expected


def test_drafts_are_the_same_as_alone(trained_head: Any) -> None:
    """Not only the text: a batch accepts as much in a step, so its heads have read the same contexts."""
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, max_num_seqs=3, num_threads=1, num_nodes=8)
    prompts = [decoder.prompt_tokenizer.encode(text) for text in trained_head.prompts[:3]]
    single = [[chunk.token_ids for chunk in chunks_of(decoder, prompt, 24)] for prompt in prompts]
    assert max(len(tokens) for chunks in single for tokens in chunks) > 2
    assert steps_together(decoder, prompts, 24) == single


def test_context_that_has_waited(trained_head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no draft has read yet is read in passes of its own, and gives the drafts it would have given."""
    monkeypatch.setattr("runtime.decode.proposers.base.MAX_PENDING_TOKENS", 24)
    random = np.random.default_rng(0)
    contexts = [random.integers(2, 250, size) for size in (90, 30, 3)]

    def draft(decoder: SpeculativeDecoder, contexts: list[Any], size: int) -> list[TokenTree]:
        runner = decoder.batch.runner
        assert isinstance(runner, HostStep)
        decoder.batch.clear()
        for slot, tokens in enumerate(contexts):
            for start in range(0, tokens.size, size):
                chunk = tokens[start : start + size]
                output = runner.target_model.prefill(chunk, start, slot=slot)
                runner.proposer.append_context([slot], [chunk], output.features)
        return runner.proposer.propose([5] * len(contexts), 10, NullRecorder())

    single = SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1, num_nodes=8)
    batched = SpeculativeDecoder.from_bundle(trained_head.bundle, max_num_seqs=3, num_threads=1, num_nodes=8)
    expected = [draft(single, [tokens], 500)[0] for tokens in contexts]
    for tree, other in zip(draft(batched, contexts, 5), expected, strict=True):
        assert np.array_equal(tree.tokens, other.tokens)
        np.testing.assert_allclose(tree.log_probs, other.log_probs, rtol=1e-3, atol=1e-4)


def test_the_steps_that_compile_the_choice_of_a_number_say_nothing_of_later_ones(
    tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = np.linspace(100, 200, 17)[None]
    monkeypatch.setattr("runtime.decoder.measure_step_ms", lambda batch, new_sequence: measured)
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_nodes=None, num_threads=1)
    budget = decoder.new_budget()
    assert isinstance(budget, AdaptiveBudget)
    np.testing.assert_array_equal(corrected_ms(budget._costs, 1), measured[0])


def test_a_shared_adaptive_budget(tiny_bundle_dir: Path) -> None:
    """Numbers of nodes that the budget chooses, by step times that loading the decoder measures."""
    plain = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, max_num_seqs=3, num_nodes=None, num_threads=1)
    budget = decoder.new_budget()
    assert isinstance(budget, AdaptiveBudget)
    step_ms = np.array([corrected_ms(budget._costs, num_seqs) for num_seqs in (1, 2, 3)])
    assert step_ms.shape == (3, MAX_NODES + 1)
    assert np.all(np.diff(step_ms, axis=1) >= 0)
    with Scheduler(decoder) as scheduler:
        requests = requests_of(decoder)[:6]
        streams = [scheduler.stream(prompt, **options) for prompt, options in requests]
        for stream, (prompt, options) in zip(streams, requests, strict=True):
            assert token_ids(list(stream)) == token_ids(list(plain.stream(prompt, **options)))

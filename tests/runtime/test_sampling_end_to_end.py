"""Sampling on the real engine, and its filters against Hugging Face's processors."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.core.errors import RequestError
from runtime.decode.acceptance import candidates
from runtime.decode.sampling_params import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, SamplingParams
from runtime.decode.sequence import Chunk
from runtime.decoder import SpeculativeDecoder
from tests.fake_engines import LANGUAGE
from tests.fakes import SAMPLING_SETTINGS, token_ids


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, 40, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_equals_hugging_face_processors(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = np.random.default_rng(seed).normal(size=100, scale=3)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    no_ids = torch.zeros(1, 1, dtype=torch.long)
    expected = chain(no_ids, torch.tensor(scores[None])).softmax(-1)[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = candidates(scores, params)
    found = np.zeros(scores.size)
    found[ids] = weights / weights.sum()
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)


def test_repetition_penalty_is_hugging_face_s() -> None:
    """Over the prompt and the output, by the best token with the penalty on."""
    params = SamplingParams(repetition_penalty=1.7)
    tokens = [2, 5]
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    for _ in range(20):
        scores = processor(
            torch.tensor([tokens]), torch.tensor(LANGUAGE.logits(LANGUAGE.state(tokens))[None])
        )
        tokens.append(int(scores.argmax()))
    assert LANGUAGE.continuation([2, 5], 20, params) == tokens[2:]


def run(decoder: SpeculativeDecoder, text: str, params: SamplingParams, count: int = 40) -> list[Chunk]:
    prompt = decoder.prompt_tokenizer.encode(text)
    return list(decoder.stream(prompt, max_new_tokens=count, sampling=params, stop_token_ids=()))


@pytest.fixture(scope="module")
def plain(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)


@pytest.fixture(scope="module")
def drafting(trained_head: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1, num_nodes=8)


def settings_of(name: str, seed: int) -> SamplingParams:
    return SamplingParams(**SAMPLING_SETTINGS[name], seed=seed, log_probs=True)


@pytest.fixture(scope="module")
def plain_text(plain: SpeculativeDecoder) -> Callable[..., list[Chunk]]:
    """``plain_text(text, name, seed)``: what the target model, which all heads share, says by itself."""
    return cache(lambda text, name, seed: run(plain, text, settings_of(name, seed)))


def test_the_largest_values_together(plain: SpeculativeDecoder) -> None:
    """None overflows: an infinite score would be in nobody's favour, and end in an error."""
    for sign in (1, -1):
        for others in ({"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1}):
            params = SamplingParams(
                temperature=1e-300,
                logit_bias={7: sign * MAX_BIAS},
                repetition_penalty=MAX_REPETITION_PENALTY**-sign,
                presence_penalty=-sign * MAX_PENALTY,
                frequency_penalty=-sign * MAX_PENALTY,
                **others,
            )
            found = token_ids(run(plain, "x", params, count=8))
            assert (found == [7] * 8) == (sign > 0)
            assert (7 in found) == (sign > 0)


@pytest.mark.parametrize("name", SAMPLING_SETTINGS)
def test_every_head_gives_the_plain_text(
    trained_head: Any, drafting: SpeculativeDecoder, plain_text: Callable[..., list[Chunk]], name: str
) -> None:
    """On two of the prompts each, which settings take in turn."""
    first, prompts = list(SAMPLING_SETTINGS).index(name), trained_head.prompts
    for seed in (first, first + 1):
        text = prompts[seed % len(prompts)]
        expected = plain_text(text, name, seed)
        drafted = run(drafting, text, settings_of(name, seed))
        assert token_ids(drafted) == token_ids(expected)
        log_probs = [
            [piece.log_prob for chunk in chunks for piece in chunk.pieces] for chunks in (expected, drafted)
        ]
        assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-4)


def test_argmax_needs_no_logits(plain: SpeculativeDecoder) -> None:
    greedy = token_ids(run(plain, "x", SamplingParams()))
    with_log_probs = run(plain, "x", SamplingParams(log_probs=True))
    assert token_ids(with_log_probs) == greedy
    assert all(
        piece.log_prob is not None and piece.log_prob <= 0 for c in with_log_probs for piece in c.pieces
    )


def test_a_bias_beyond_the_vocabulary_is_refused(plain: SpeculativeDecoder) -> None:
    size = plain.sequence_factory.vocab_size
    with pytest.raises(RequestError, match=f"logit_bias: must be token ids below {size}, got {size}"):
        plain.stream([5], max_new_tokens=1, sampling=SamplingParams(logit_bias={size: 1.0}))

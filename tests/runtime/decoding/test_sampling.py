"""Sampling against the exact distribution, Hugging Face's processors, and itself without speculation."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.checks.sampling import chi_square_p
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    Sampler,
    SamplingParams,
    candidates,
    log_prob,
)
from runtime.decoding.sequence import Chunk
from runtime.decoding.target_model import VerifyOutput
from runtime.errors import RequestError
from runtime.trees.token_tree import TokenTree

VOCAB_SIZE = 6
NO_FEATURES = np.empty((0, 0), np.float32)


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    """A language model: other logits after every prefix."""
    return _logits_after(tuple(tokens))


@lru_cache(maxsize=10_000)
def _logits_after(tokens: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng([7, *tokens]).normal(size=VOCAB_SIZE, scale=1.5).astype(np.float32)


def probabilities(scores: NDArray[Any], params: SamplingParams) -> NDArray[np.float64]:
    ids, weights = candidates(scores.astype(np.float64), params)
    found = np.zeros(scores.size)
    found[ids] = weights / weights.sum()
    return found


def random_tree(anchor: int, random: np.random.Generator) -> TokenTree:
    parents, tokens = [-1], [anchor]
    taken = set()
    for _ in range(int(random.integers(0, 9))):
        node = (int(random.integers(0, len(tokens))), int(random.integers(0, VOCAB_SIZE)))
        if node not in taken:
            taken.add(node)
            parents.append(node[0])
            tokens.append(node[1])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    arrays = (np.array(values, np.int64) for values in (tokens, parents, depths))
    return TokenTree(*arrays, np.zeros(len(tokens)))  # type: ignore[arg-type,call-arg]


def verdict_on(tree: TokenTree, prefix: list[int]) -> VerifyOutput:
    """What the model says after every node; ``prefix`` ends before the anchor."""
    rows = [logits_after([*prefix, int(tree.tokens[0]), *tree.path(node)]) for node in range(len(tree))]
    logits = np.stack(rows)
    return VerifyOutput(logits.argmax(-1), NO_FEATURES, logits)


def continue_prompt(
    prompt: list[int], count: int, params: SamplingParams, random: np.random.Generator | None
) -> tuple[list[int], list[float]]:
    """``count`` tokens after the prompt, with random trees or with none at all."""
    sampler = Sampler(params, prompt, VOCAB_SIZE)
    text, log_probs = list(prompt), []
    while len(text) < len(prompt) + count:
        tree = TokenTree.root(text[-1]) if random is None else random_tree(text[-1], random)
        found = sampler.accept(tree, verdict_on(tree, text[:-1]))
        text += [*tree.tokens[found.path[1:]].tolist(), found.bonus]
        log_probs += found.log_probs
    return text[len(prompt) :][:count], log_probs[:count]


SETTINGS = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 2.0, "min_p": 0.3},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "bias": {"temperature": 1.0, "logit_bias": {1: 2.0, 4: -3.0}},
    "all": {
        "temperature": 0.9,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "logit_bias": {0: 1.0},
    },
    "penalised argmax": {"repetition_penalty": 1.5, "presence_penalty": 1.0},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_trees_do_not_change_the_draws(settings: dict[str, Any]) -> None:
    for seed in range(30):
        params = SamplingParams(**settings, seed=seed, log_probs=True)
        plain = continue_prompt([seed % VOCAB_SIZE, 2], 25, params, None)
        assert continue_prompt([seed % VOCAB_SIZE, 2], 25, params, np.random.default_rng(seed)) == plain


def test_seeds_differ_and_none_is_a_new_one() -> None:
    def texts(seeds: Sequence[int | None]) -> set[tuple[int, ...]]:
        params = [SamplingParams(temperature=1.5, seed=seed) for seed in seeds]
        return {tuple(continue_prompt([1], 30, p, None)[0]) for p in params}

    assert len(texts(range(20))) == 20
    assert len(texts([3, 3, 3])) == 1
    assert len(texts([None] * 20)) == 20
    assert len(texts([0, 2**63, 2**64 - 1])) == 3


@pytest.mark.parametrize("name", ["warm", "cool", "top_k", "top_p", "penalties", "all"])
def test_continuations_have_the_exact_distribution(name: str) -> None:
    """Chi-square over all continuations of length 2, every one drawn with a seed of its own."""
    prompt, count = [3, 3, 1], 10_000
    random = np.random.default_rng(0)
    expected: dict[tuple[int, int], float] = {}
    settings = SamplingParams(**SETTINGS[name])

    def distribution(output: list[int]) -> NDArray[np.float64]:
        scores = logits_after([*prompt, *output]).astype(np.float64)
        for token, bias in settings.logit_bias.items():
            scores[token] += bias
        for token in set(prompt + output):
            penalty = settings.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        for token in set(output):
            scores[token] -= settings.presence_penalty + settings.frequency_penalty * output.count(token)
        return probabilities(scores, settings)

    for first, p in enumerate(distribution([])):
        for second, q in enumerate(distribution([first])):
            expected[first, second] = float(p * q)
    found = dict.fromkeys(expected, 0)
    for seed in range(count):
        tokens, _ = continue_prompt(prompt, 2, SamplingParams(**SETTINGS[name], seed=seed), random)
        found[tokens[0], tokens[1]] += 1
    observed, wanted = np.array(list(found.values())), count * np.array(list(expected.values()))
    assert chi_square_p(observed, wanted) > 0.01


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
    expected = chain(torch.zeros(1, 1, dtype=torch.long), torch.tensor(scores[None])).softmax(-1)[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(probabilities(scores, params), expected.numpy(), atol=1e-12)


def test_repetition_penalty_is_hugging_face_s() -> None:
    """Over the prompt and the output, by the best token with the penalty on."""
    params = SamplingParams(repetition_penalty=1.7)
    tokens = [2, 5]
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    for _ in range(20):
        scores = processor(torch.tensor([tokens]), torch.tensor(logits_after(tokens)[None]))
        tokens.append(int(scores.argmax()))
    assert continue_prompt([2, 5], 20, params, None)[0] == tokens[2:]


def test_level_tokens_stay_together() -> None:
    scores = np.array([1.0, 2.0, 2.0, 0.0])
    assert np.count_nonzero(probabilities(scores, SamplingParams(temperature=1, top_k=1))) == 2
    assert np.count_nonzero(probabilities(scores, SamplingParams(temperature=1, top_p=0.1))) == 2


@pytest.mark.parametrize("temperature", [1e-4, 1e-300, 1e9])
def test_extreme_temperatures(temperature: float) -> None:
    found = probabilities(np.array([0.0, -1e30, 3.0, 2.999]), SamplingParams(temperature=temperature))
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(1)
    assert found.argmax() == 2


def test_log_probabilities_are_the_model_s_own() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, presence_penalty=1, seed=1, log_probs=True)
    tokens, log_probs = continue_prompt([4], 12, params, np.random.default_rng(0))
    for index, token in enumerate(tokens):
        expected = torch.tensor(logits_after([4, *tokens[:index]])).log_softmax(-1)[token]
        assert log_probs[index] == pytest.approx(float(expected), abs=1e-5)
    assert log_prob(np.array([1e4, 0, 0], np.float32), 0) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature: must be a number from 0 on, got -1"),
        ({"temperature": math.nan}, "temperature: must be a number from 0 on, got nan"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k: must be 0"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p: must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be between 0.01 and 100, got 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty: must be between -2 and 2, got 3"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": {3: math.inf}}, "logit_bias: must be between -10000 and 10000 for token 3, got inf"),
        ({"logit_bias": {3: -1e5}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"seed": -1}, "seed: must be between 0 and"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


# On the real engine.


def run(decoder: SpeculativeDecoder, text: str, params: SamplingParams, count: int = 40) -> list[Chunk]:
    prompt = decoder.prompt_tokenizer.encode(text)
    return list(decoder.stream(prompt, max_new_tokens=count, sampling=params, stop_token_ids=()))


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def log_probs_of(chunks: list[Chunk]) -> list[float]:
    found = [piece.log_prob for chunk in chunks for piece in chunk.pieces]
    assert None not in found
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def vanilla(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)


def test_the_largest_values_together(vanilla: SpeculativeDecoder) -> None:
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
            found = tokens_of(run(vanilla, "x", params, count=8))
            assert (found == [7] * 8) == (sign > 0)
            assert (7 in found) == (sign > 0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_head_gives_the_plain_text(
    trained_head: Any, vanilla: SpeculativeDecoder, settings: dict[str, Any]
) -> None:
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1)
    for seed, text in enumerate(trained_head.prompts):
        params = SamplingParams(**settings, seed=seed, log_probs=True)
        plain, drafted = run(vanilla, text, params), run(decoder, text, params)
        assert tokens_of(drafted) == tokens_of(plain)
        log_probs = [
            [piece.log_prob for chunk in chunks for piece in chunk.pieces] for chunks in (plain, drafted)
        ]
        assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-4)


def test_argmax_needs_no_logits(vanilla: SpeculativeDecoder) -> None:
    greedy = tokens_of(run(vanilla, "x", SamplingParams()))
    assert SamplingParams(top_k=5, top_p=0.5, seed=3).is_argmax
    assert not SamplingParams(log_probs=True).is_argmax
    with_log_probs = run(vanilla, "x", SamplingParams(log_probs=True))
    assert tokens_of(with_log_probs) == greedy
    assert all(
        piece.log_prob is not None and piece.log_prob <= 0 for c in with_log_probs for piece in c.pieces
    )


def test_a_bias_beyond_the_vocabulary_is_refused(vanilla: SpeculativeDecoder) -> None:
    size = vanilla.vocab_size
    with pytest.raises(RequestError, match=f"logit_bias: must be token ids below {size}, got {size}"):
        vanilla.stream([5], max_new_tokens=1, sampling=SamplingParams(logit_bias={size: 1.0}))

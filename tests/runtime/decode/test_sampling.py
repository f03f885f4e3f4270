"""Sampling against the exact distribution, a slow generator of uniform numbers, and itself without drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.core.bundle import MAX_GRAPH_TOP_K
from runtime.core.errors import RequestError
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Sampler, candidates, inverse_transform, uniform
from runtime.decode.sampling_params import ARGMAX_OPTIONS, GRAPH_OPTIONS, SamplingParams
from tests.fake_engines import FakeLanguage
from tests.fakes import SAMPLING_SETTINGS, make_tree

VOCAB_SIZE = 6
LANGUAGE = FakeLanguage(VOCAB_SIZE)


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    return _logits_after(tuple(tokens))


@lru_cache(maxsize=100_000)
def _logits_after(tokens: tuple[int, ...]) -> NDArray[np.float32]:
    return LANGUAGE.logits(LANGUAGE.state(tokens))


def probabilities(scores: NDArray[Any], params: SamplingParams) -> NDArray[np.float64]:
    ids, weights = candidates(scores.astype(np.float64), params)
    found = np.zeros(scores.size)
    found[ids] = weights / weights.sum()
    return found


def random_tree(root: int, random: np.random.Generator) -> TokenTree:
    """Up to eight drafts; no two children of a node have the same token."""
    drafts: list[tuple[int, int]] = []
    for _ in range(int(random.integers(0, 9))):
        draft = (int(random.integers(0, len(drafts) + 1)), int(random.integers(0, VOCAB_SIZE)))
        if draft not in drafts:
            drafts.append(draft)
    return make_tree(root, drafts)


def logits_of(tree: TokenTree, prefix: list[int]) -> NDArray[np.float32]:
    """What the model says after every node; ``prefix`` ends before the root."""
    context = [*prefix, int(tree.tokens[0])]
    return np.stack([logits_after([*context, *tree.path(node)]) for node in range(len(tree))])


def continue_prompt(
    prompt: list[int], count: int, params: SamplingParams, random: np.random.Generator | None
) -> tuple[list[int], list[float]]:
    """``count`` tokens after the prompt, with random trees or with none at all."""
    sampler = Sampler(params, prompt, VOCAB_SIZE)
    text, log_probs = list(prompt), list[float]()
    while len(text) < len(prompt) + count:
        tree = TokenTree.root(text[-1]) if random is None else random_tree(text[-1], random)
        logits = logits_of(tree, text[:-1])
        found = sampler.accept(tree, logits.argmax(-1), logits)
        text += [*tree.tokens[found.path[1:]].tolist(), found.bonus]
        log_probs += [score.log_prob for score in found.scores]
    return text[len(prompt) :][:count], log_probs[:count]


@pytest.mark.parametrize("settings", SAMPLING_SETTINGS.values(), ids=SAMPLING_SETTINGS)
def test_trees_do_not_change_the_draws(settings: dict[str, Any]) -> None:
    for seed in range(12):
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


# Philox-4x64-10 (Salmon et al., 2011): multipliers, and what is added to the key after every round.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
WORD = 2**64


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds, in whole numbers of Python."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second // WORD) ^ b ^ k, second % WORD, (first // WORD) ^ d ^ m, first % WORD
        k, m = (k + KEY_STEPS[0]) % WORD, (m + KEY_STEPS[1]) % WORD
    return a, b, c, d


def test_the_reference_has_the_known_answers() -> None:
    """Of Random123's ``kat_vectors``."""
    assert philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32, 2**63, 2**64 - 1])
def test_uniform_numbers_are_those_of_philox(seed: int) -> None:
    """A device that draws them in its own way has to give the same texts."""
    for index in (0, 1, 2, 1000, 2**31):
        word = philox((1, 0, 0, 0), (seed, index))[0]
        assert uniform(seed, index) == (word >> 11) / 2**53


def test_uniform_numbers_are_uniform() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(4000)], [uniform(7, index) for index in range(4000)]):
        shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / 4000
        assert np.abs(shares - 0.1).max() < 0.02
        assert 0 <= min(numbers) <= max(numbers) < 1


@pytest.mark.parametrize(
    ("weights", "u", "token"),
    [
        ([1.0, 2.0, 1.0], 0.0, 10),
        ([1.0, 2.0, 1.0], 0.2499, 10),
        ([1.0, 2.0, 1.0], 0.25, 11),  # the first at which the sum exceeds the share
        ([1.0, 2.0, 1.0], 0.7499, 11),
        ([1.0, 2.0, 1.0], 0.75, 12),
        ([1.0, 2.0, 1.0], 1 - 2**-53, 12),
        ([0.0, 1.0, 0.0], 0.0, 11),  # what has no probability is never drawn
        ([0.0, 1.0, 0.0], 1 - 2**-53, 11),
        ([1.0, 1e-300, 0.0], 1 - 2**-53, 10),
        ([3e-320, 0.0, 0.0], 0.5, 10),
    ],
)
def test_inverse_transform_golden(weights: list[float], u: float, token: int) -> None:
    assert inverse_transform(np.arange(10, 10 + len(weights)), np.array(weights), u) == token


@pytest.mark.parametrize("settings", SAMPLING_SETTINGS.values(), ids=SAMPLING_SETTINGS)
def test_the_token_at_every_index_is_drawn_with_its_own_number(settings: dict[str, Any]) -> None:
    """Over the filtered and renormalised distribution, in the vocabulary's order, added up by hand."""
    prompt = [3, 1]
    params = SamplingParams(**settings, seed=11)
    tokens, _ = continue_prompt(prompt, 40, params, np.random.default_rng(3))
    for index, token in enumerate(tokens):
        output = tokens[:index]
        scores = adjusted(prompt, output, params)
        if params.temperature == 0:
            assert token == scores.argmax()
            continue
        below = 0.0
        for smaller in range(token):
            below += probabilities(scores, params)[smaller]
        assert below <= uniform(11, index) < below + probabilities(scores, params)[token]


def adjusted(prompt: list[int], output: list[int], params: SamplingParams) -> NDArray[np.float64]:
    """The scores after an output, with bias and penalties."""
    scores = logits_after([*prompt, *output]).astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(prompt + output):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return scores


@pytest.mark.parametrize("name", ["warm", "cool", "top_k", "top_p", "penalties", "all"])
def test_continuations_have_the_exact_distribution(name: str) -> None:
    """Chi-square over all continuations of length 2, every one drawn with a seed of its own."""
    prompt, count = [3, 3, 1], 3_000
    random = np.random.default_rng(0)
    expected: dict[tuple[int, int], float] = {}
    settings = SamplingParams(**SAMPLING_SETTINGS[name])

    for first, p in enumerate(probabilities(adjusted(prompt, [], settings), settings)):
        for second, q in enumerate(probabilities(adjusted(prompt, [first], settings), settings)):
            expected[first, second] = float(p * q)
    found = dict.fromkeys(expected, 0)
    for seed in range(count):
        tokens, _ = continue_prompt(prompt, 2, SamplingParams(**SAMPLING_SETTINGS[name], seed=seed), random)
        found[tokens[0], tokens[1]] += 1
    assert chi_square_p(found, {tokens: count * share for tokens, share in expected.items()}) > 0.01


def chi_square_p(found: dict[tuple[int, int], int], expected: dict[tuple[int, int], float]) -> float:
    """The probability of counts at least this far from the expected (Wilson and Hilferty's approximation).

    Cells below 5 are put together; 0 where something was drawn that cannot be.
    """
    if any(found[cell] for cell, wanted in expected.items() if wanted == 0):
        return 0.0
    pairs = [(found[cell], wanted) for cell, wanted in expected.items() if wanted >= 5]
    rare = [(found[cell], wanted) for cell, wanted in expected.items() if 0 < wanted < 5]
    if sum(wanted for _, wanted in rare) >= 5:
        pairs.append((sum(drawn for drawn, _ in rare), sum(wanted for _, wanted in rare)))
    statistic = sum((drawn - wanted) ** 2 / wanted for drawn, wanted in pairs)
    spread = 2 / (9 * (len(pairs) - 1))
    normal = ((statistic / (len(pairs) - 1)) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 1 - NormalDist().cdf(normal)


def test_the_chi_square_check_can_fail() -> None:
    """The 99 % quantile for 35 degrees of freedom is 57.34."""
    expected = {(0, cell): 1000.0 for cell in range(36)}
    shift = math.sqrt(57.34 * 1000 / 2)
    found = dict.fromkeys(expected, 1000)
    found[0, 0], found[0, 1] = round(1000 + shift), round(1000 - shift)
    assert chi_square_p(found, expected) == pytest.approx(0.01, abs=0.001)


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
        probs = np.exp(logits_after([4, *tokens[:index]]).astype(np.float64))
        assert log_probs[index] == pytest.approx(math.log(probs[token] / probs.sum()), abs=1e-9)


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


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    params = SamplingParams(logit_bias={VOCAB_SIZE: 1.0})
    with pytest.raises(RequestError, match="logit_bias: must be token ids below 6, got 6"):
        Sampler(params, [5], VOCAB_SIZE)


def test_only_what_the_argmax_of_the_graph_cannot_tell_needs_logits() -> None:
    assert SamplingParams(top_k=5, top_p=0.5, seed=3).is_argmax
    assert not SamplingParams(log_probs=True).is_argmax
    for settings in SAMPLING_SETTINGS.values():
        assert not SamplingParams(**settings).is_argmax


# A value of every field that is not its default.
OTHER_VALUES: dict[str, Any] = {
    "logit_bias": {1: 0.5},
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "temperature": 0.7,
    "top_k": MAX_GRAPH_TOP_K,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 0,
    "log_probs": True,
    "top_log_probs": 2,
}


@dataclass(frozen=True)
class ParamsWithAnotherOption(SamplingParams):
    """As they would be with a new option, which no graph knows."""

    typical_p: float = 1.0


def test_graphs_follow_the_options_on_their_list_and_no_others() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(OTHER_VALUES)
    for name, value in OTHER_VALUES.items():
        found = Sampler(SamplingParams(**{name: value}), [5], VOCAB_SIZE).graph_sampling
        assert (found is not None) == (name in GRAPH_OPTIONS), name
        if found is not None and name != "seed":
            assert getattr(found, name) == value
    assert Sampler(SamplingParams(top_k=MAX_GRAPH_TOP_K + 1), [5], VOCAB_SIZE).graph_sampling is None


def test_the_argmax_follows_only_options_that_cannot_change_it() -> None:
    for name, value in OTHER_VALUES.items():
        assert SamplingParams(**{name: value}).is_argmax == (name in ARGMAX_OPTIONS), name


def test_a_new_option_is_the_host_s_until_a_list_names_it() -> None:
    params = ParamsWithAnotherOption(temperature=0.7, typical_p=0.5)
    assert Sampler(params, [5], VOCAB_SIZE).graph_sampling is None
    assert not ParamsWithAnotherOption(typical_p=0.5).is_argmax
    assert Sampler(ParamsWithAnotherOption(temperature=0.7), [5], VOCAB_SIZE).graph_sampling is not None

"""The device's draws against the host's, as torch computes them and as ONNX Runtime does."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.graphs.trace import name_axes, trace_standard
from export.step.acceptance import BLOCK, first_above, log_probs_of, sample_tokens
from export.trt.compiler import compile_engine, load_library
from runtime.core.bundle import MAX_GRAPH_TOP_K, GraphSpec, TensorSpec
from runtime.decode.acceptance import candidates, fill_uniforms, inverse_transform, score_tokens
from runtime.decode.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Logits = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]

# The error of cumulative shares in float32; a draw may differ from the host's only if it moved by no more.
TOLERANCE = 1e-5
TEMPERATURES = (0.0, 1e-35, 1e-4, 0.3, 1.0, 2.0, 100.0)
TOP_K = (0, 1, 20, MAX_GRAPH_TOP_K)
# No round numbers: the boundary of equal weights would lie exactly between two, where rounding decides.
TOP_P = (1.0, 0.137, 0.713, 0.9983)
MIN_P = (0.0, 0.013, 0.27, 1.0)
EVERY_FILTER = [
    SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=least)
    for temperature, k, p, least in product(TEMPERATURES, TOP_K, TOP_P, MIN_P)
]
FAMILIES: dict[str, Logits] = {
    "flat": lambda random, shape: np.zeros(shape),
    "near-uniform": lambda random, shape: random.normal(0, 0.1, shape),
    "usual": lambda random, shape: random.normal(0, 3, shape) + 15,
    "peaked": lambda random, shape: random.normal(0, 20, shape),
    "ties": lambda random, shape: random.normal(0, 2, shape).round(),
    "excluded": lambda random, shape: np.where(
        random.random(shape) < 0.4, -np.inf, random.normal(0, 3, shape)
    ),
}
PARAMETERS = {"temperature": "float32", "top_k": "int64", "top_p": "float32", "min_p": "float32"}


def as_arrays(params: list[SamplingParams]) -> dict[str, NDArray[Any]]:
    return {
        name: np.array([getattr(each, name) for each in params], dtype) for name, dtype in PARAMETERS.items()
    }


def draw(logits: Floats, uniforms: Floats, params: list[SamplingParams]) -> NDArray[np.int64]:
    inputs = {"logits": logits, "uniforms": uniforms, **as_arrays(params)}
    return sample_tokens(**{name: torch.from_numpy(array) for name, array in inputs.items()}).numpy()


def uniforms_of(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Uniform numbers, 0 and the largest below 1 among them."""
    out = np.empty(shape, np.float32)
    fill_uniforms(out.reshape(-1), int(random.integers(2**63)), 0)
    choice = random.random(shape)
    out[choice < 0.02] = 0
    out[choice > 0.98] = 1 - 2.0**-24
    return out


def count_differences(
    logits: Floats, uniforms: Floats, params: list[SamplingParams], tokens: NDArray[np.int64]
) -> int:
    """How many tokens [B, N] are not the host's; none may be further from its draw than the tolerance."""
    differences = 0
    for (sequence, node), token in np.ndenumerate(tokens):
        filters, u = params[sequence], float(uniforms[sequence, node])
        scores = logits[sequence, node].astype(np.float64)
        if filters.temperature == 0:
            assert token == scores.argmax()
            continue
        ids, weights = candidates(scores, filters)
        if token == inverse_transform(ids, weights, u):
            continue
        differences += 1
        # The shares at which the host's draw would begin and cease to be this token; they are one if it drops
        # the token.
        cumulative = np.append(0, weights.cumsum() / weights.sum())
        start, end = np.searchsorted(ids, token), np.searchsorted(ids, token, side="right")
        distance = max(cumulative[start] - u, u - cumulative[end])
        assert distance < TOLERANCE, (filters, u, token)
    return differences


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_the_hosts(family: str) -> None:
    """Every combination of filters, and vocabularies below, at and beside a whole number of blocks."""
    random = np.random.default_rng(0)
    num_drawn, differences = 0, 0
    for vocab_size in (5, BLOCK, 2 * BLOCK + 1, 3001):
        shape = (len(EVERY_FILTER), 2, vocab_size)
        logits = FAMILIES[family](random, shape).astype(np.float32)
        # No row may be excluded as a whole.
        logits[..., -1] = np.maximum(logits[..., -1], 0)
        uniforms = uniforms_of(random, shape[:2])
        tokens = draw(logits, uniforms, EVERY_FILTER)
        differences += count_differences(logits, uniforms, EVERY_FILTER, tokens)
        num_drawn += tokens.size
    assert num_drawn > 3000
    assert differences <= num_drawn // 1000


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_a_large_vocabulary_and_a_wide_nucleus(scale: float) -> None:
    random = np.random.default_rng(1)
    params = [
        SamplingParams(temperature=temperature, top_p=top_p)
        for temperature, top_p in product((0.9, 1.0, 1.3), (1.0, 0.7131))
    ]
    logits = random.normal(0, scale, (len(params), 3, 150_000)).astype(np.float32)
    assert candidates(logits[1, 0].astype(np.float64), params[1])[0].size > 4 * MAX_GRAPH_TOP_K
    uniforms = uniforms_of(random, (len(params), 3))
    tokens = draw(logits, uniforms, params)
    # A token's share is hardly above the rounding of a sum, so another order of summation may move a draw.
    assert count_differences(logits, uniforms, params, tokens) <= 2


def test_tokens_level_with_the_last_one_stay() -> None:
    """Three filters that each cut within the same three tokens keep all of them, and nothing else."""
    logits = np.tile(np.array([1, 0, 1, 3, -2, 1, -2], np.float32), (3, 400, 1))
    uniforms = np.tile(np.linspace(0, 1, 400, endpoint=False, dtype=np.float32), (3, 1))
    params = [
        SamplingParams(temperature=1, top_k=2),
        SamplingParams(temperature=1, top_p=0.75),
        # The share counts within top_k: among all tokens the nucleus would be wider than the best token.
        SamplingParams(temperature=1, top_k=2, top_p=0.69),
    ]
    assert [set(row) for row in draw(logits, uniforms, params)] == [{0, 2, 3, 5}, {0, 2, 3, 5}, {3}]


@pytest.mark.parametrize("distance", [1e-7, 1e-6])
def test_logits_that_differ_little_are_not_level(distance: float) -> None:
    """Their scores in float32 are: the largest score is 0 and theirs round alike."""
    level = np.float32(1e-3)
    nearby = np.float32(level - distance)
    logits = np.tile(np.array([level, nearby, 50], np.float32), (2, 100, 1))
    assert np.float32(level - 50) == np.float32(nearby - 50)
    uniforms = np.tile(np.linspace(0, 1, 100, endpoint=False, dtype=np.float32), (2, 1))
    params = [SamplingParams(temperature=50, top_k=2), SamplingParams(temperature=50, top_p=0.75)]
    assert [set(row) for row in draw(logits, uniforms, params)] == [{0, 2}, {0, 2}]


@pytest.mark.parametrize("best", [3.0, np.nextafter(np.float32(3), np.float32(4))])
def test_neighbours_in_float32_are_not_level(best: float) -> None:
    """The best token alone is the nucleus. The mean of both rounds to the one with an even last digit."""
    logits = np.tile(np.array([best, np.nextafter(np.float32(best), np.float32(0))], np.float32), (1, 100, 1))
    uniforms = np.linspace(0, 1, 100, endpoint=False, dtype=np.float32)[None]
    assert set(draw(logits, uniforms, [SamplingParams(temperature=1, top_p=0.4)])[0]) == {0}


def test_a_nucleus_that_is_off_keeps_the_least_weights() -> None:
    """Rounding makes a sum equal with and without this token, but the number 0 draws it."""
    logits, uniforms = np.array([[[-30, 0]]], np.float32), np.zeros((1, 1), np.float32)
    assert draw(logits, uniforms, [SamplingParams(temperature=1)]).tolist() == [[0]]


def test_a_share_at_a_boundary_is_the_next_token() -> None:
    logits, uniforms = np.zeros((1, 4, 4), np.float32), np.array([[0, 0.25, 0.5, 0.75]], np.float32)
    assert draw(logits, uniforms, [SamplingParams(temperature=1)]).tolist() == [[0, 1, 2, 3]]


def test_a_token_of_no_weight_is_never_drawn() -> None:
    """Neither if the first tokens weigh nothing, nor if the last ones do."""
    logits = np.full((1, 2, 3 * BLOCK), -200, np.float32)
    logits[..., BLOCK + 3 : BLOCK + 6] = [0, -1, 0]
    uniforms = np.array([[0, 1 - 2.0**-24]], np.float32)
    params = [SamplingParams(temperature=1)]
    assert draw(logits, uniforms, params).tolist() == [[BLOCK + 3, BLOCK + 5]]


@pytest.mark.parametrize(("target", "index"), [(-0.1, 1), (0.0, 1), (0.9, 1), (1.0, 3), (2.9, 3), (3.1, 3)])
def test_rounding_of_a_parallel_sum_draws_no_weight(target: float, index: int) -> None:
    """The cumulative weights of a device may rise a little where no weight is, and end below the target."""
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    cumulative = torch.tensor([1e-7, 1.0, 1.0 + 1e-6, 3.0, 3.0 + 1e-6])
    assert first_above(weights, cumulative, torch.tensor([target])).tolist() == [index]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-35])
def test_the_coldest_draw_is_the_best_token(temperature: float) -> None:
    logits = np.random.default_rng(2).normal(size=(1, 50, 300)).astype(np.float32)
    uniforms = uniforms_of(np.random.default_rng(3), (1, 50))
    tokens = draw(logits, uniforms, [SamplingParams(temperature=temperature)])
    assert np.array_equal(tokens, logits.argmax(-1))


def test_frequencies() -> None:
    """Pearson's statistic of 20,000 draws; with six degrees of freedom 1 of 10,000 exceeds 27.9."""
    num_draws = 20_000
    scores = np.array([0.3, -1, 2, 1.1, 0, -0.2, 1.7, -3], np.float32)
    params = SamplingParams(temperature=0.8, top_k=7)
    ids, weights = candidates(scores.astype(np.float64), params)
    uniforms = np.empty(num_draws, np.float32)
    fill_uniforms(uniforms, 11, 0)
    tokens = draw(np.tile(scores, (1, num_draws, 1)), uniforms[None], [params])
    found = np.bincount(tokens[0], minlength=scores.size)
    assert found.sum() == found[ids].sum()
    expected = num_draws * weights / weights.sum()
    assert ((found[ids] - expected) ** 2 / expected).sum() < 27.9


@pytest.mark.parametrize("offset", [0, 1000])
def test_log_probabilities(offset: float) -> None:
    random = np.random.default_rng(4)
    logits = (random.normal(0, 4, (3, 5, 1003)) + offset).astype(np.float32)
    tokens = random.integers(0, 1003, (3, 5))
    tokens[0] = logits[0].argmax(-1)
    found = log_probs_of(torch.from_numpy(logits), torch.from_numpy(tokens)).numpy()
    expected = [
        [score.log_prob for score in score_tokens(row, row_tokens.tolist(), 0)]
        for row, row_tokens in zip(logits, tokens, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


class Draws(nn.Module):
    """Both functions behind a contract."""

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = sample_tokens(**inputs)
        return tokens, log_probs_of(inputs["logits"], tokens)


def contract_of(vocab_size: int) -> GraphSpec:
    return GraphSpec(
        (
            TensorSpec("logits", ("B", "N", vocab_size), "float32"),
            TensorSpec("uniforms", ("B", "N"), "float32"),
            *(TensorSpec(name, ("B",), dtype) for name, dtype in PARAMETERS.items()),
        ),
        (TensorSpec("tokens", ("B", "N"), "int64"), TensorSpec("log_probs", ("B", "N"), "float32")),
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GraphSpec]:
    """The functions as a graph, of a vocabulary wider than MAX_GRAPH_TOP_K and no whole number of blocks."""
    contract = contract_of(3001)
    model = trace_standard(Draws(), contract)
    name_axes(model, contract)
    path = tmp_path_factory.mktemp("step") / "draws.onnx"
    ir.save(model, path)
    return path, contract


@pytest.mark.parametrize("num_nodes", [1, 17])
def test_onnx_runtime_draws_alike(graph: tuple[Path, GraphSpec], num_nodes: int) -> None:
    random = np.random.default_rng(5)
    params = EVERY_FILTER[::17]
    logits = random.normal(0, 3, (len(params), num_nodes, 3001)).astype(np.float32)
    uniforms = uniforms_of(random, logits.shape[:2])
    session = ort.InferenceSession(graph[0], providers=["CPUExecutionProvider"])
    tokens, log_probs = session.run(None, {"logits": logits, "uniforms": uniforms, **as_arrays(params)})
    differences = count_differences(logits, uniforms, params, tokens)
    assert differences <= tokens.size // 500
    assert (tokens != draw(logits, uniforms, params)).sum() <= tokens.size // 500
    expected = log_probs_of(torch.from_numpy(logits), torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-5)


def test_compiles(graph: tuple[Path, GraphSpec]) -> None:
    pytest.importorskip(
        "tensorrt_rtx_bindings",
        reason="TensorRT for RTX has no wheel for this platform",
        exc_type=ImportError,
    )
    path, contract = graph
    profiles = ({"B": (1, 1, 8), "N": (1, 17, 65)},)
    engine = compile_engine(load_library("tensorrt-rtx"), path, contract, profiles, capabilities=("sm89",))
    assert engine.plan

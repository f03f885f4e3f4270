"""What the plug-in refuses, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from drafters.config import DrafterConfig
from integrations.vllm.plugin import version_problem
from integrations.vllm.settings import DraftError, DraftSettings, head_problem, model_problem, serving_problem


def head(**settings: Any) -> DrafterConfig:
    sizes = {
        "vocab_size": 90,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "target_layer_ids": (1,),
        "base_num_layers": 4,
    }
    return DrafterConfig(**{**sizes, **settings})


def test_settings_are_read_back() -> None:
    config = SimpleNamespace(ctc_speculator={"head": head().to_dict(), "top_k": 5})
    assert DraftSettings.read(config, "draft") == DraftSettings(head(), 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "^draft/config.json: expected the key 'ctc_speculator'"),
        ({"head": {}}, "^draft/config.json: expected the key 'ctc_speculator'"),
        (
            {"head": {}, "top_k": 5},
            "^draft/config.json: ctc_speculator: field 'intermediate_size' is missing",
        ),
        (
            {"head": head(drafter_type="medusa").to_dict(), "top_k": 5},
            "^draft/config.json: ctc_speculator: drafter_type: expected ctc or block, got 'medusa'",
        ),
    ],
)
def test_a_directory_that_cannot_be_read(values: Any, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        DraftSettings.read(SimpleNamespace(ctc_speculator=values), "draft")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter_type": "hydra"}, "drafter_type: expected ctc or block, got 'hydra'"),
        ({"drafter_type": "eagle"}, "drafter_type: expected ctc or block, got 'eagle'"),
        ({"trunk": "residual"}, "trunk: expected 'attention'"),
        (
            {"trunk": "streams", "num_layers": 2},
            "trunk: expected a head with passes of its own",
        ),
    ],
)
def test_heads_without_chains_in_vllm(settings: dict[str, Any], message: str) -> None:
    assert (head_problem(head(**settings)) or "").startswith(message)


def test_heads_with_chains_in_vllm() -> None:
    assert head_problem(head()) is None
    assert head_problem(head(drafter_type="block", transition="markov", num_layers=2)) is None


def test_other_models() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 16, "num_layers": 4}
    assert model_problem(head(), **sizes) is None
    for name, field in (("vocab_size",) * 2, ("hidden_size",) * 2, ("num_layers", "base_num_layers")):
        problem = model_problem(head(base_model="m"), **{**sizes, name: 7})
        assert problem is not None
        assert problem.startswith(f"{field}: expected the model's 7, got")
        assert problem.endswith("the head was made for another model, 'm'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (
            {"num_speculative_tokens": 8},
            "num_speculative_tokens: expected 1 to 7, one fewer than",
        ),
        ({"use_local_argmax_reduction": False}, "use_local_argmax_reduction: expected true"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1"),
    ],
)
def test_ways_to_serve(changes: dict[str, Any], message: str | None) -> None:
    values = {
        "num_speculative_tokens": 7,
        "use_local_argmax_reduction": True,
        "pipeline_parallel_size": 1,
        **changes,
    }
    options = SimpleNamespace(**values)
    problem = serving_problem(head(), options, options)
    assert problem is None if message is None else (problem or "").startswith(message)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1rc1"])
def test_versions_that_are_supported(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", None])
def test_versions_that_are_not(version: str | None) -> None:
    problem = version_problem(version)
    assert problem is not None
    assert "expected vLLM 0.32 (tested with 0.32.0), got " in problem
    assert "\n" not in problem

"""What the plug-in refuses of vLLM, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from integrations.vllm.plugin import VERSIONS, serving_problem
from tests.integrations.heads import head_config


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
    problem = serving_problem(head_config(), options, options)
    assert problem is None if message is None else (problem or "").startswith(message)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1rc1"])
def test_versions_that_are_supported(version: str) -> None:
    assert VERSIONS.problem(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", None])
def test_versions_that_are_not(version: str | None) -> None:
    problem = VERSIONS.problem(version)
    assert problem is not None
    assert "expected vLLM 0.32 (tested with 0.32.0), got " in problem
    assert "\n" not in problem

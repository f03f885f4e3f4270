"""The comparison of steps on a device with steps on the host."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.decode.step import StepResult
from runtime.device.step import GraphStep
from tests import step_equality_on_memory


@pytest.fixture
def arguments(tiny_step_bundle: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b c", "d")))
    named = {"--bundle": tiny_step_bundle, "--prompts": prompts, "--max-new-tokens": 12, "--batch": 2}
    return [str(part) for pair in named.items() for part in pair]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_device_of_memory(arguments: list[str], sampled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_equality_on_memory.main([*arguments, *(["--sampled"] if sampled else [])]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"prompts": 3, "equal": 3, "batch": 2, "sampled": sampled}


def test_a_wrong_token_is_found(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really_step = GraphStep.step

    def step(self: GraphStep, *args: Any) -> StepResult:
        result = really_step(self, *args)
        result.tokens[-1, 0] += 1
        return result

    monkeypatch.setattr(GraphStep, "step", step)
    assert step_equality_on_memory.main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["equal"] < 3

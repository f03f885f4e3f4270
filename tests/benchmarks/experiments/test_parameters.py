"""The table of parameters, at Vicuna-7B's sizes and at those of a given model."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import parameters

HEADS = """
[[head]]
name = "medusa"
drafter_type = "medusa"
num_frames = 4
own_lm_head = true

[[head]]
name = "streams"
drafter_type = "streaming"
stream_mode = "shared"
num_frames = 4
"""


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    path = tmp_path / "heads.toml"
    path.write_text(HEADS)
    return path


def test_published_sizes(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1 of arXiv 2402.11131 has 5.91e8 and 8.2e4."""
    assert parameters.main(["--heads", str(heads)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `medusa` | medusa | 591,417,344 | 591,417,344 |"
    assert lines[3] == "| `streams` | streaming | 5,079,040 | 81,920 |"


def test_another_model(heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    argv = ["--heads", str(heads), "--sizes", str(tmp_path / "config.json")]
    assert parameters.main(argv) == 0
    # An embedding for each of 4 streams, and the early exit of rank 8.
    assert capsys.readouterr().out.splitlines()[3].endswith(f" {4 * 8 + 2 * 8 * 8} |")


def test_bad_input_is_one_line(heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    argv = ["--heads", str(heads), "--sizes", str(tmp_path / "config.json")]
    assert parameters.main(argv) == 2
    assert capsys.readouterr().err.endswith("config.json; hidden_size is missing\n")

"""The tables of passes: every bundle, number of rows and operator, and one line for bad input."""

import json
from pathlib import Path

import onnx
import pytest

from benchmarks.experiments import pass_rows
from runtime.engines.operators import operator_library


def test_every_bundle_and_number_of_rows(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundles", str(tiny_bundle_dir), "--rows", "1,5", "--length", "30", "--repeats", "2"]
    assert pass_rows.main([*argv, "--threads", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "pass_rows.json").read_text())
    assert report["command"].endswith(f"--threads 1 --out {tmp_path}")
    assert [(row["rows"], len(row["ms"])) for row in report["rows"]] == [(1, 2), (5, 2)]
    assert (tmp_path / "pass_rows.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("compiled", [False, True])
def test_the_operators_of_every_number_of_rows(
    compiled: bool,
    tiny_bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiled and operator_library() is None:
        pytest.skip("this machine does not compile the operators")
    if not compiled:
        monkeypatch.setattr(pass_rows, "has_compiled_form", lambda *_: False)
    argv = ["--bundles", str(tiny_bundle_dir), "--rows", "1,5", "--length", "30", "--repeats", "2"]
    assert pass_rows.main([*argv, "--operators", "--threads", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "pass_operators.json").read_text())
    assert [each["rows"] for each in report["passes"]] == [1, 5]
    graph = onnx.load(tiny_bundle_dir / "backbone.onnx", load_external_data=False).graph
    scatters = sum(node.op_type == "TensorScatter" for node in graph.node)
    layers = scatters // 2
    for each in report["passes"]:
        operators = each["operators"]
        assert all(time >= 0 for _, time in operators.values())
        if compiled:
            assert operators["RotaryTreeAttention"][0] == layers
            assert operators["TreeProduct"][0] == 4 * layers + 1
            continue
        assert operators["TensorScatter"][0] == scatters
        attention = [number for kind, (number, _) in operators.items() if kind.endswith(" of attention")]
        assert sum(attention) == 3 * layers  # scores, weighted values, sums of the weights
        assert operators["MatMul"][0] >= 4 * layers
    assert (tmp_path / "pass_operators.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 0,2", "--rows: must be a whole number of at least 1, got '0'"),
        ("--rows many", "--rows: must be a whole number of at least 1, got 'many'"),
        ("--length 500", "--length: with 17 rows must be at most 495, got 500"),
        ("--length 500 --operators", "--length: with 17 rows must be at most 495, got 500"),
    ],
)
def test_bad_input(
    arguments: str, message: str, tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundles", str(tiny_bundle_dir), "--out", str(tmp_path / "out"), *arguments.split()]
    assert pass_rows.main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

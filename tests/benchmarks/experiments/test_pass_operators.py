"""The table of a pass's operators: those of the graph, told apart, and none beside them."""

import json
from pathlib import Path

import onnx
import pytest

from benchmarks.experiments import pass_operators


def test_the_operators_of_every_number_of_rows(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundles", str(tiny_bundle_dir), "--rows", "1,5", "--length", "30", "--repeats", "2"]
    assert pass_operators.main([*argv, "--threads", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "pass_operators.json").read_text())
    assert [each["rows"] for each in report["passes"]] == [1, 5]
    graph = onnx.load(tiny_bundle_dir / "backbone.onnx", load_external_data=False).graph
    scatters = sum(node.op_type == "TensorScatter" for node in graph.node)
    layers = scatters // 2
    for each in report["passes"]:
        operators = each["operators"]
        assert operators["TensorScatter"][0] == scatters
        attention = [number for kind, (number, _) in operators.items() if kind.endswith(" of attention")]
        assert sum(attention) == 3 * layers  # scores, weighted values, sums of the weights
        assert operators["MatMul"][0] >= 4 * layers
        assert all(time >= 0 for _, time in operators.values())
    assert (tmp_path / "pass_operators.md").read_text() in capsys.readouterr().out

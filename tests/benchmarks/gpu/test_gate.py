"""The gate compares every engine of a bundle with the reference, and says loudly what it did not compare."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.__main__ import main
from export.verify.comparison import compare, float_difference
from export.verify.device_passes import decoded, encoded
from runtime.core.bundle import MANIFEST_NAME, Bundle
from tests.benchmarks.gpu.wrong_engines import with_wrong_engine
from tests.engine_bundles import device_of_memory

QUICK = ["--max-new-tokens", "12", "--max-prompts", "2", "--threads", "1", "--parts", "gate"]
GRAPHS = {"backbone", "drafter", "prepare", "search_0", "search_4", "search_8", "accept", "accept_sampled"}
GRAPHS |= {"commit"}


def run(bundle: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the gate's part of the report."""
    status = main(["--bundle", str(bundle), "--out", str(out), *QUICK, *options])
    return status, json.loads((out / "gpu.json").read_text(encoding="utf-8"))["parts"]["gate"]


def without_checks(source: Path, out: Path) -> Path:
    """The same bundle as if nothing had been compared at the export."""
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).symlink_to(file)
    manifest = dataclasses.replace(Bundle.load(source, verify=False).manifest, validation={})
    (out / MANIFEST_NAME).unlink()
    (out / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return out


def test_every_engine_is_compared(
    tiny_engine_bundle: Path, tiny_step_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = device_of_memory(monkeypatch, tiny_engine_bundle)
    status, gate = run(tiny_engine_bundle, tmp_path, "--reference", str(tiny_step_bundle))
    assert (status, gate["status"], gate["unchecked"]) == (0, "passed", [])
    rows = {row["graph"]: row for row in gate["engines"]["rows"]}
    assert rows.keys() == GRAPHS
    assert all(row["passes"] >= 2 and not row["problems"] for row in rows.values())
    assert cudart.leftovers() == []


@pytest.mark.parametrize(
    ("graph", "tensor"),
    [
        ("backbone", "features"),
        ("drafter", "frame_logprobs"),
        ("prepare", "frame_position_ids"),
        ("search_4", "input_ids"),
        ("search_8", "node_log_probs"),
        ("accept", "path"),
        ("accept_sampled", "new_counts"),
        ("commit", "path_features"),
        ("commit", "present_value_1"),
    ],
)
def test_a_wrong_engine_fails_the_gate(
    graph: str,
    tensor: str,
    tiny_engine_bundle: Path,
    tiny_step_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = with_wrong_engine(tiny_engine_bundle, tmp_path / "bundle", graph, tensor)
    device_of_memory(monkeypatch, bundle)
    status, gate = run(bundle, tmp_path / "out", "--reference", str(tiny_step_bundle))
    assert (status, gate["status"]) == (1, "failed")
    assert [row["graph"] for row in gate["engines"]["rows"] if row["problems"]] == [graph]


def test_what_the_reference_lacks_is_not_passed(
    tiny_engine_bundle: Path, tiny_step_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of_memory(monkeypatch, tiny_engine_bundle)
    reference = tmp_path / "reference"
    reference.mkdir()
    for file in tiny_step_bundle.iterdir():
        (reference / file.name).symlink_to(file)
    manifest = Bundle.load(tiny_step_bundle, verify=False).manifest
    graphs = {name: graph for name, graph in manifest.graphs.items() if name != "search_8"}
    (reference / MANIFEST_NAME).unlink()
    changed = dataclasses.replace(manifest, graphs=graphs, step_nodes=(0, 4))
    (reference / MANIFEST_NAME).write_text(changed.to_json(), encoding="utf-8")
    status, gate = run(tiny_engine_bundle, tmp_path / "out", "--reference", str(reference))
    assert (status, gate["status"], gate["unchecked"]) == (1, "not checked", ["search_8"])
    assert gate["reason"].startswith("NOT CHECKED: search_8;")


def test_a_gate_that_checks_nothing_does_not_pass(
    tiny_engine_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of_memory(monkeypatch, tiny_engine_bundle)
    bundle = without_checks(tiny_engine_bundle, tmp_path / "bundle")
    status, gate = run(bundle, tmp_path / "out")
    assert (status, gate["status"]) == (1, "not checked")
    assert set(gate["unchecked"]) == GRAPHS
    assert "--reference takes a bundle" in gate["reason"]


def test_a_reference_that_cannot_be_one_is_one_line(
    tiny_engine_bundle: Path,
    tiny_step_bundle: Path,
    tiny_bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    for reference, message in (
        (tiny_engine_bundle, "must be a bundle for ONNX Runtime"),
        (tiny_bundle_dir, "has no graphs of steps"),
        (tmp_path / "none", "is no engine bundle"),
    ):
        options = ["--bundle", str(tiny_step_bundle), "--device", "cpu", "--reference", str(reference)]
        assert main([*options, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert not out.exists() or list(out.iterdir()) == []


def test_values_of_half_precision_are_rounded_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.1415927], np.float32)
    rounded = decoded(encoded(values, "bfloat16"), "bfloat16")
    assert rounded.tolist() == [1.0, 1.0, 1 + 4 * 2**-8, -3.140625]
    assert decoded(encoded(values, "float16"), "float16").dtype == np.float32
    assert encoded(np.array([3]), "int64").dtype == np.int64


def test_only_rounding_excuses_a_difference() -> None:
    ones = np.ones(3, np.float32)
    assert float_difference(np.array([1, np.nan, 1], np.float32), ones) == float("inf")
    dead = np.array([0, -np.inf, 1], np.float32)
    assert float_difference(dead, dead) == 0
    assert float_difference(ones, dead) == float("inf")
    # Two labels of nearly the same rank may change places, others may not.
    expected = {"frame_tokens": np.array([[5, 6, 7]]), "frame_logprobs": np.array([[-1, -1.00001, -4.0]])}
    swapped = {**expected, "frame_tokens": np.array([[6, 5, 7]])}
    assert compare("drafter", {}, swapped, expected, 1e-4)[1] == []
    wrong = {**expected, "frame_tokens": np.array([[7, 6, 5]])}
    assert "frame_tokens: 2 of 3 differ" in compare("drafter", {}, wrong, expected, 1e-4)[1][0]
    logits = {"next_tokens": np.array([[1]]), "logits": np.array([[[0.0, 4.0, 3.9999]]])}
    assert compare("backbone", {}, {**logits, "next_tokens": np.array([[2]])}, logits, 1e-4)[1] == []
    assert compare("backbone", {}, {**logits, "next_tokens": np.array([[0]])}, logits, 1e-4)[1]


def tree(order: list[int]) -> dict[str, np.ndarray]:
    """A root with two children in one of two orders, behind 3 tokens."""
    ids, probabilities = np.array([5, 8, 9]), np.array([1, 0.4, 0.3])
    ancestors = np.eye(3, dtype=np.bool_)
    ancestors[:, 0] = True
    mask = np.zeros((1, 3, 8), np.bool_)
    mask[..., :3], mask[..., 3:6] = True, ancestors
    return {
        "input_ids": ids[order][None],
        "position_ids": np.array([[3, 4, 4]]),
        "attn_mask": mask[None],
        "parents": np.array([[-1, 0, 0]]),
        "depths": np.array([[0, 1, 1]]),
        "ancestors": ancestors[None],
        "node_log_probs": np.log(probabilities[order])[None],
    }


def test_trees_may_differ_in_the_order_of_nodes() -> None:
    lengths, expected, swapped = {"lengths": np.array([3])}, tree([0, 1, 2]), tree([0, 2, 1])
    assert compare("search_4", lengths, swapped, expected, 1e-4)[1] == []
    for name, value, message in (
        ("input_ids", [[5, 9, 7]], "has probability"),
        ("depths", [[0, 1, 2]], "depths are not"),
        ("position_ids", [[3, 4, 5]], "positions are not"),
        ("parents", [[-1, 2, 0]], "before its parent"),
        ("ancestors", np.eye(3, dtype=np.bool_)[None], "ancestors are not"),
        ("attn_mask", ~swapped["attn_mask"], "the mask is not"),
    ):
        wrong = {**swapped, name: np.asarray(value)}
        assert message in compare("search_4", lengths, wrong, expected, 1e-4)[1][0]

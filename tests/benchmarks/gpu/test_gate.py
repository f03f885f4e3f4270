"""The gate compares every engine of a bundle with the reference, and says loudly what it did not compare."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu.__main__ import main
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
    manifest = replace(Bundle.load(source, verify=False).manifest, validation={})
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
    "wrong",
    [
        {"backbone": "features", "search_4": "input_ids", "accept": "path", "commit": "path_features"},
        {
            "drafter": "frame_logprobs",
            "prepare": "frame_position_ids",
            "search_8": "node_log_probs",
            "accept_sampled": "new_counts",
            "commit": "present_value_1",
        },
    ],
)
def test_wrong_engines_fail_the_gate(
    wrong: dict[str, str],
    tiny_engine_bundle: Path,
    tiny_step_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names each of them, and none that only follows one."""
    bundle = tiny_engine_bundle
    for graph, tensor in wrong.items():
        bundle = with_wrong_engine(bundle, tmp_path / graph, graph, tensor)
    device_of_memory(monkeypatch, bundle)
    status, gate = run(bundle, tmp_path / "out", "--reference", str(tiny_step_bundle))
    assert (status, gate["status"]) == (1, "failed")
    assert {row["graph"] for row in gate["engines"]["rows"] if row["problems"]} == wrong.keys()


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
    changed = replace(manifest, graphs=graphs, step_nodes=(0, 4))
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

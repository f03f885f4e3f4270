"""The first run in stages, rehearsed on a CPU: each writes its file, and one that fails leaves others."""

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu import quick, shapes
from benchmarks.gpu.__main__ import main
from runtime.core.bundle import MANIFEST_NAME, Bundle
from runtime.device.pytorch.device import TorchDevice
from runtime.load.device import open_device


@pytest.fixture
def bundle(tiny_step_bundle: Path, tmp_path: Path) -> Path:
    """A bundle of the target torch."""
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_step_bundle, copy)
    manifest = replace(Bundle.load(copy).manifest, target="torch")
    (copy / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return copy


def run(bundle: Path, out: Path, stages: str) -> tuple[int, dict[str, Any]]:
    options = ["--device", "cpu", "--small", "--threads", "1", "--stages", stages, "--minutes", "8"]
    status = main(["--quick", "--bundle", str(bundle), "--out", str(out), *options])
    return status, json.loads((out / "quick.json").read_text(encoding="utf-8"))


def test_a_stage_that_fails_leaves_the_others(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = bundle / "drafter.onnx"
    head.write_bytes(bytes(head.stat().st_size))
    status, found = run(bundle, tmp_path / "out", "smoke,gate,kernels,shapes")
    assert status == 1
    assert [each["status"] for each in found.values()] == ["measured", "error", "skipped", "measured"]
    assert "gate.log" in found["gate"]["reason"]
    assert "drafter.onnx is not the file of the bundle" in (tmp_path / "out/gate.log").read_text()
    assert "gate: error" in capfd.readouterr().out
    rows = json.loads((tmp_path / "out/shapes.json").read_text(encoding="utf-8"))["rows"]
    cells = {(row["batch"], row["context"], row["nodes"]) for row in rows}
    assert cells == {
        (batch, context, nodes) for batch in (1, 2) for context in (32, 64) for nodes in (0, 4, 8)
    }
    assert set(rows[1]["ms"]) == {"draft", "search", "verify", "accept", "commit"}
    assert all(ms > 0 for row in rows for ms in row["ms"].values())
    smoke = json.loads((tmp_path / "out/smoke.json").read_text(encoding="utf-8"))["torch"]
    assert list(smoke) == ["copies", "replay 0", "replay 1", "replay 2"]


def test_the_gate_of_a_cpu(bundle: Path, tmp_path: Path) -> None:
    """In this process, which has imported torch."""
    options = ["--bundle", str(bundle), "--device", "cpu", "--small", "--threads", "1", "--minutes", "8"]
    assert main(["--quick", "--stage", "gate", "--out", str(tmp_path / "out"), *options]) == 0
    parts = json.loads((tmp_path / "out/gate.json").read_text(encoding="utf-8"))
    assert parts["status"] == "measured"
    assert {parts[name]["status"] for name in ("gate", "lossless")} == {"passed"}


def test_a_stage_that_hangs_is_stopped(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: Any) -> Any:
        (tmp_path / "smoke.json").write_text('{"status": "running", "reason": ""}')
        raise quick.subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(quick.subprocess, "run", hang)
    status, found = run(bundle, tmp_path, "smoke")
    assert status == 1
    assert found["smoke"]["status"] == "error"
    assert found["smoke"]["reason"].startswith("was stopped after")


@pytest.mark.parametrize("is_stopped", [True, False])
def test_parts_of_a_stage_that_is_stopped_are_kept(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """And none of an earlier run in the same directory."""
    old, new = ({"parts": {name: {"status": "measured"}}} for name in ("host_gap", "bandwidth"))
    report = tmp_path / "steps" / "gpu.json"
    report.parent.mkdir()
    report.write_text(json.dumps(old), encoding="utf-8")

    def measure(command: list[str], **options: Any) -> Any:
        if not is_stopped:
            return quick.subprocess.CompletedProcess(command, 2)
        report.write_text(json.dumps(new), encoding="utf-8")
        raise quick.subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(quick.subprocess, "run", measure)
    run(bundle, tmp_path, "steps")
    found = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))
    assert found["status"] == "error"
    assert found.keys() - {"status", "reason"} == ({"bandwidth"} if is_stopped else set())
    assert report.exists() == is_stopped


def test_a_stage_counts_what_its_process_takes_to_start(bundle: Path, tmp_path: Path) -> None:
    """Otherwise it is stopped before it would end by itself."""
    began = time.monotonic()
    options = ["--device", "cpu", "--small", "--threads", "1", "--until", str(began)]
    for stage in ("shapes", "steps"):
        settings = ["--stage", stage, "--bundle", str(bundle), "--out", str(tmp_path), *options]
        assert main(["--quick", *settings]) == 0
    skipped, steps = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("shapes", "steps")
    )
    assert (skipped["status"], skipped["reason"]) == ("skipped", "the time was over after 0 rows")
    command = json.loads((tmp_path / "steps" / "gpu.json").read_text(encoding="utf-8"))["settings"]
    assert command["minutes"] == 1 / 60
    assert steps["status"] == "measured"


def test_caches_are_allocated_once_as_large_as_they_fit(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Bundle.load(bundle)
    device, make = open_device(loaded, "cpu", 1)
    assert isinstance(device, TorchDevice)
    shape = dataclasses.replace(shapes.SMALL, dtype="float32")
    passes = shapes._Passes(device, shape, loaded, make)
    free = 700 * shape.cache_bytes / shapes.CACHE_SHARE
    monkeypatch.setattr(device, "is_gpu", True)
    monkeypatch.setattr(device, "free_memory", lambda: (free, free))
    passes.reserve([100, 600, 1200])
    monkeypatch.undo()
    allocated = {tensor: array for (_, tensor), array in passes._memory.items()}
    assert len(allocated) == 2 * shape.layers
    assert sum(array.nbytes for array in allocated.values()) == 600 * shape.cache_bytes
    passes.milliseconds(2, 172, 4)  # 2 * (172 + ROOM) positions
    assert {tensor: passes._memory["", tensor] for tensor in allocated} == allocated
    device.close()

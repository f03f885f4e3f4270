"""The whole command: on the CPU, and the code for GPUs on a device whose memory is the host's."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.gpu import checks, peers, step_times
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.decoders import Limits, Skip, TimedStep
from benchmarks.gpu.job import contexts, device_facts
from benchmarks.gpu.report import Part, is_bad, run_part
from runtime.core.bundle import DRAFT, PLAIN
from runtime.core.errors import DeviceError
from runtime.engines.recorder import StepRecord
from tests.device_of_memory import FakeCudart
from tests.engine_bundles import device_of_memory

QUICK = ["--max-new-tokens", "12", "--steps", "6", "--contexts", "32,64,4096", "--batches", "1,2,4"]
QUICK += ["--max-prompts", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch takes seconds, and what it would run is no part of the project."""
    reason = (None, "not installed")
    monkeypatch.setattr(peers, "PEERS", dict.fromkeys(peers.PEERS, lambda *_: reason))


@pytest.fixture
def cudart(tiny_engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    return device_of_memory(monkeypatch, tiny_engine_bundle)


def run(bundle: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report."""
    status = main(["--bundle", str(bundle), "--out", str(out), *QUICK, *options])
    return status, json.loads((out / "gpu.json").read_text(encoding="utf-8"))


def test_a_device_is_measured_from_end_to_end(
    tiny_engine_bundle: Path, tiny_step_bundle: Path, cudart: FakeCudart, tmp_path: Path
) -> None:
    status, report = run(tiny_engine_bundle, tmp_path / "out", "--reference", str(tiny_step_bundle))
    parts = report["parts"]
    assert status == 0
    assert list(parts) == list(PARTS)
    checks = {"gate": "passed", "lossless": "passed"}
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(PARTS, "measured") | checks
    assert report["device"]["name"] == "Device of memory"
    reference = parts["gate"]["with_reference"]
    assert reference["same"] == reference["tokens"] > 0
    assert [row["num_nodes"] for row in parts["lossless"]["rows"]] == [0, 4, 8]
    assert all(row["equal"] == 2 for row in parts["lossless"]["rows"])
    sampled = parts["lossless"]["sampled"]["rows"]
    settings = ["plain", "4 nodes", "8 nodes", "not captured", "reference on the CPU"]
    assert [row["setting"] for row in sampled] == settings
    assert all(row["equal"] == 2 for row in sampled)
    # 64 GB/s by the clock and the width of the stand-in's memory.
    for row in parts["bandwidth"]["rows"]:
        read = row["weight_bytes"] + row["cache_bytes"]
        assert row["share"] == pytest.approx(read / (row["step_ms"] / 1e3) / 64e9)
    assert all(row["captured_ms"]["count"] >= 5 for row in parts["tree_sizes"]["rows"])
    plain, small, _ = parts["stages"]["rows"]
    assert plain["stages_ms"]["draft"] < small["stages_ms"]["draft"]
    assert all(small["stages_ms"][stage] > 0 for stage in ("draft", "verify", "commit"))
    for row in parts["host_gap"]["rows"]:
        assert 0 < row["device_ms"]["p50"] < row["whole_ms"]["p50"]
    cells = {(row["sequences"], row["context"]): row for row in parts["batches"]["rows"]}
    assert cells[2, 64]["speedup"] > 0
    assert cells[4, 32]["plain"] == {"skipped": "the bundle takes 3 sequences at most"}
    assert cells[1, 4096]["draft"] == {"skipped": "the bundle takes 256 tokens at most"}
    page = (tmp_path / "out/gpu.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "Device of memory" in (tmp_path / "out/gpu.md").read_text(encoding="utf-8")
    assert cudart.leftovers() == []


def test_a_cpu_is_measured_and_said_to_be_one(tiny_step_bundle: Path, tmp_path: Path) -> None:
    status, report = run(tiny_step_bundle, tmp_path, "--device", "cpu", "--parts", "gate,lossless,bandwidth")
    assert status == 0
    assert list(report["parts"]) == ["gate", "lossless", "bandwidth"]
    assert "backbone" in report["parts"]["gate"]["at_export"]
    assert all(row["share"] is None for row in report["parts"]["bandwidth"]["rows"])
    markdown = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert " with a ctc draft head on the CPU, onnxruntime" in markdown.splitlines()[0]
    assert "The CPU was measured" in markdown
    assert "The CPU was measured" in (tmp_path / "gpu.html").read_text(encoding="utf-8")


def test_a_device_that_fails_leaves_the_other_parts(
    tiny_engine_bundle: Path, cudart: FakeCudart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = PARTS["stages"]

    def fail_once(job: Any) -> Part:
        job.decoders.get("plain")
        cudart.fail_next("cudaStreamSynchronize", 2)
        return measure(job)

    monkeypatch.setitem(PARTS, "stages", fail_once)
    status, report = run(tiny_engine_bundle, tmp_path, "--parts", "stages,host_gap")
    assert status == 0
    assert report["parts"]["stages"]["status"] == "error"
    assert "DeviceError: cudaStreamSynchronize: out of memory" in report["parts"]["stages"]["reason"]
    assert report["parts"]["host_gap"]["status"] == "measured"
    assert cudart.leftovers() == []


def test_wrong_tokens_fail_the_run(
    tiny_engine_bundle: Path,
    tiny_step_bundle: Path,
    cudart: FakeCudart,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_run = checks.time_run

    def wrong(setting: Any, *rest: Any, **options: Any) -> Any:
        found = time_run(setting, *rest, **options)
        last = (found.token_ids[-1] + 1) % 256
        return replace(found, token_ids=(*found.token_ids[:-1], last)) if setting.name != "plain" else found

    monkeypatch.setattr(checks, "time_run", wrong)
    status, report = run(tiny_engine_bundle, tmp_path, "--parts", "lossless")
    assert status == 1
    rows = report["parts"]["lossless"]["rows"]
    assert [row["mismatches"] for row in rows] == [0, 2, 2]
    assert all(difference["logit_gap"] > 1e-4 for difference in report["parts"]["lossless"]["differences"])
    monkeypatch.setattr(checks, "gaps_below_best", lambda *_: np.array([0.0, 0.5]))
    options = "--parts", "gate", "--reference", str(tiny_step_bundle)
    status, report = run(tiny_engine_bundle, tmp_path, *options)
    assert status == 1
    assert report["parts"]["gate"]["with_reference"]["worst"] == 0.5


def test_input_that_cannot_be_used_is_one_line(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--bundle", str(tiny_bundle_dir), "--out", str(tmp_path)]
    for more, message in (
        ([], "has no graphs of steps"),
        (["--parts", "gate,speed"], "--parts: must be among gate, lossless"),
        (["--bandwidth", "0"], "--bandwidth: must be a number above 0"),
    ):
        assert main([*options, *more]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_one_line(
    tiny_engine_bundle: Path,
    tiny_step_bundle: Path,
    cudart: FakeCudart,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines, graphs, out = str(tiny_engine_bundle), str(tiny_step_bundle), tmp_path / "out"

    def refusal(bundle: str, *options: str) -> tuple[int, str]:
        status = main(["--bundle", bundle, "--out", str(out), *options])
        (line,) = capsys.readouterr().err.splitlines()
        return status, line

    for name in ("cuda:abc", "gpu", ""):
        for bundle in (engines, graphs):
            assert refusal(bundle, "--device", name) == (
                2,
                f"gpu: device: must be cpu, cuda:0, cuda:1 and so on, got {name!r}",
            )
    status, line = refusal(engines, "--device", "cpu")
    assert (status, line.split(" holds ")[1]) == (
        2,
        "engines of tensorrt-rtx, which run on a GPU, not on cpu",
    )
    assert refusal(engines, "--device", "cuda:1")[0] == 1
    monkeypatch.setattr("runtime.device.cuda.load_cudart", lambda: None)
    status, line = refusal(engines)
    assert status == 1
    assert line.startswith("gpu: cuda:0: the CUDA runtime's bindings are not installed")
    assert not out.exists() or list(out.iterdir()) == []


def test_parts_keep_what_went_wrong() -> None:
    cleared: list[str] = []

    def failing() -> Part:
        raise DeviceError("gone")

    def skipping() -> Part:
        raise Skip("no head")

    parts = {
        "gate": run_part(failing, after_error=lambda: cleared.append("gate")),
        "stages": run_part(skipping, after_error=lambda: cleared.append("stages")),
    }
    assert [(part.status, part.reason) for part in parts.values()] == [
        ("error", "DeviceError: gone"),
        ("skipped", "no head"),
    ]
    assert cleared == ["gate"]
    assert is_bad(parts, ["gate", "lossless"])
    assert not is_bad(parts, ["stages"])


@pytest.mark.parametrize(
    ("measure", "calls", "settings"),
    [
        (step_times.tree_sizes, 1, 0),
        (step_times.tree_sizes, 7, 1),  # plain steps in three rounds of two modes, then one mode
        (step_times.tree_sizes, 8, 2),
        (step_times.tree_sizes, 99, 3),
        (step_times.stages, 0, 1),
        (step_times.stages, 2, 2),
        (step_times.host_gap, 2, 2),
        (step_times.host_gap, 99, 3),
    ],
)
def test_what_was_measured_before_the_time_was_over_is_kept(
    measure: Callable[[Any], Part], calls: int, settings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """calls: after which the time is over; settings: of which there are rows then"""
    step = TimedStep(StepRecord(0, (("device", 5), ("verify", 9)), 10, 1, 1, 0), 1.0, 1)
    measure_steps = MagicMock(return_value=[step])
    monkeypatch.setattr(step_times, "measure_steps", measure_steps)
    job = MagicMock(settings=[("plain", PLAIN, 0), ("4 nodes", DRAFT, 4), ("8 nodes", DRAFT, 8)])
    job.limits = Limits(6, 1.0)
    type(job).is_over = property(lambda _: measure_steps.call_count >= calls)
    if not settings:
        with pytest.raises(Skip, match=r"^the time for the whole run was over"):
            measure(job)
        return
    part = measure(job)
    names = [name for name, _, _ in job.settings]
    assert [row["step"] for row in part.data["rows"]] == names[:settings]
    (table,) = part.tables.values()
    assert [row[0] for row in table[1:]] == names[:settings]
    left_out = f"without {', '.join(names[settings:])}: the time for the whole run was over"
    assert part.reason.startswith(left_out) == (settings < 3)


def test_contexts_are_prompts_strung_together() -> None:
    assert contexts([[1, 2], [3]], 5, 3) == [[1, 2, 3, 1, 2], [3, 1, 2, 3, 1], [1, 2, 3, 1, 2]]


def test_the_drivers_bandwidth_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr("runtime.device.cuda.load_cudart", lambda: cudart)
    assert device_facts("cuda:0", None).bandwidth == 64e9
    assert device_facts("cuda:0", 936.0).bandwidth == 936e9
    cudart.memory_clock_khz = 0  # as newer drivers say of some GPUs
    assert device_facts("cuda:0", None).bandwidth is None
    assert device_facts("cpu", None).bandwidth is None


def test_peers_that_are_missing_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for run_peer in (peers.hf_plain, peers.hf_static, peers.vllm):
        speed, reason = run_peer(Path("model"), [1], 8)
        assert speed is None
        assert reason.endswith("is not installed")


def test_a_peers_first_token_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def generate(prompt: Any, count: int) -> None:
        now[0] += 5.0 + 0.5 * (count - 1)

    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])
    assert peers.tokens_per_second(generate, [1], 9) == pytest.approx(2.0)

"""The latency profiler's command on a tiny bundle."""

import json
import shutil
from pathlib import Path

import pytest

from runtime.core.bundle import MANIFEST_NAME
from runtime.core.errors import RequestError
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import StageRecorder
from runtime.profiler.__main__ import main
from runtime.profiler.measure import Setting, time_run, turns


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "One?"}\n{"question": "And then?"}\n{"question": "Why?"}\n')
    return path


def test_numbers_and_auto_side_by_side(
    tiny_bundle_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert main([*argv, "--num-nodes", "auto,4,2,4", "--max-new-tokens", "24", "--warmup", "1"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    sizes = report["speculative"]["by_num_nodes"]
    assert list(sizes) == ["2", "4", "auto"]
    assert all(row["lossless"]["identical"] == 3 for row in sizes.values())
    assert str(report["speculative"]["num_nodes"]) in sizes
    assert report["bundle"]["drafter_precision"] == "fp32"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.html",
        "trace.json",
    }
    table = capsys.readouterr().out
    assert all(f"\n{name} nodes" in table for name in sizes)


def test_a_place_that_cannot_be_written_is_refused_first(
    tiny_bundle_dir: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not after the measurement. The kernel's own file system takes no files, not even root's."""
    out = "/sys/new/report"
    assert main(["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", out]) == 2
    expected = f"profiler: --out {out}: /sys cannot be written; expected a directory that can\n"
    assert capsys.readouterr().err == expected


def test_plain_decoding_is_not_compared_with_itself(
    tiny_bundle_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert main([*argv, "--method", "plain"]) == 2
    assert capsys.readouterr().err == (
        "profiler: --method: plain decoding is what the others are compared with, got plain alone\n"
    )


@pytest.mark.parametrize("has_head", [True, False])
def test_drafts_of_the_text_alone(
    tiny_bundle_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_head: bool
) -> None:
    """They need no head, and have a fixed number of nodes."""
    bundle, out = tiny_bundle_dir, tmp_path / "out"
    argv = ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "4", "--num-nodes", "4,auto"]
    if has_head:
        argv += ["--method", "plain"]
    else:
        bundle = tmp_path / "bundle"
        shutil.copytree(tiny_bundle_dir, bundle)
        manifest = json.loads((bundle / MANIFEST_NAME).read_text())
        (bundle / MANIFEST_NAME).write_text(json.dumps(manifest | {"drafter": None}))
        assert main(["--bundle", str(bundle), *argv]) == 2
        assert "no draft head to profile" in capsys.readouterr().err
    assert main(["--bundle", str(bundle), *argv, "--prompt-lookup"]) == 0
    settings = json.loads((out / "report.json").read_text())["settings"]
    assert (settings["method"], settings["num_nodes"]) == ("plain", [4])
    assert " with drafts of the text</" in (out / "report.html").read_text()


def test_measuring_leaves_the_runners_recorder(tiny_bundle_dir: Path) -> None:
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_nodes=4, num_threads=1)
    decoder.batch.runner.recorder = metrics = StageRecorder()
    setting = Setting(4, decoder)
    prompt = decoder.prompt_tokenizer.encode("Why?")
    run = time_run(setting, prompt, 8)
    assert len(run.token_ids) == 8
    assert sum(step.num_accepted + 1 for step in run.steps) >= run.num_decoded
    assert all(step.num_seqs == 1 and step.num_nodes == 5 for step in run.steps)
    assert decoder.batch.runner.recorder is metrics
    with pytest.raises(RequestError):
        time_run(setting, [], 8)
    assert decoder.batch.runner.recorder is metrics
    assert metrics.steps == []


@pytest.mark.parametrize("count", [1, 2, 5, 13, 41])
def test_every_setting_takes_every_turn(count: int) -> None:
    orders = [list(turns(count, number)) for number in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert sorted(order[0] for order in orders) == list(range(count))


def test_turns_are_the_docstring_example() -> None:
    assert [next(turns(5, number)) for number in range(6)] == [0, 3, 1, 4, 2, 0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("4,0", "must be a whole number of at least 1, got '0'"),
        ("4,fast", "must be a whole number of at least 1, got 'fast'"),
        ("", "must be a whole number of at least 1, got ''"),
        ("300,auto", "must be at most 256 nodes, got 300"),
    ],
)
def test_bad_sizes(
    tiny_bundle_dir: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: str,
    message: str,
) -> None:
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "--num-nodes", sizes])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_steps_on_a_device(tiny_step_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """Their stages are measured, and no passes on the host beside them."""
    argv = ["--bundle", str(tiny_step_bundle), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    argv += ["--num-nodes", "4", "--max-new-tokens", "12", "--max-prompts", "2", "--warmup", "0"]
    assert main([*argv, "--step", "graph"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert all(values["mean"] > 0 for values in report["speculative"]["stages_ms"].values())
    assert report["verify_ms_by_tree_size"] == {}
    assert report["lossless"]["identical"] == 2

"""Commands say which sizes of trees run in place of those that were asked for."""

import json
from pathlib import Path

import pytest

from runtime import generate
from runtime.device.plan import _lengths, size_that_runs
from runtime.profiler import __main__ as profiler


@pytest.mark.parametrize(("wanted", "size"), [(0, 0), (1, 4), (4, 4), (5, 8), (64, 8)])
def test_the_next_larger_size_runs(wanted: int, size: int) -> None:
    assert size_that_runs((0, 4, 8), wanted) == size


def test_each_length_reads_twice_as_much() -> None:
    """Behind a text there is room for a step."""
    assert _lengths(8192, 40) == (472, 984, 2008, 4056, 8192)
    assert _lengths(6000, 40) == (472, 984, 2008, 4056, 6000)
    assert _lengths(4096, 40) == (472, 984, 2008, 4096)
    assert _lengths(600, 40) == (600,)
    assert _lengths(2000, 520) == (504, 2000)


def test_generate_says_which_size_runs(tiny_step_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--bundle",
        str(tiny_step_bundle),
        "--prompt",
        "hello",
        "--max-new-tokens",
        "4",
        "--threads",
        "1",
    ]
    arguments += ["--json", "--step"]
    line = "generate: --num-nodes: steps have 8 nodes in place of 64; the bundle has graphs for 4, 8"
    for options, lines in (
        (["graph", "--num-nodes", "64"], [line]),
        (["graph", "--num-nodes", "8"], []),
        (["graph", "--num-nodes", "64", "--method", "plain"], []),
        (["host", "--num-nodes", "64"], []),
    ):
        assert generate.main([*arguments, *options]) == 0
        assert capsys.readouterr().err.splitlines() == lines


def test_the_profiler_labels_what_ran(
    tiny_step_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "One?"}\n')
    argv = ["--bundle", str(tiny_step_bundle), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    argv += ["--step", "graph", "--num-nodes", "3,8,64", "--max-new-tokens", "8", "--warmup", "0"]
    assert profiler.main([*argv, "--threads", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("profiler: ")]
    assert [line.partition(";")[0] for line in lines] == [
        "profiler: --num-nodes: steps have 4 nodes in place of 3",
        "profiler: --num-nodes: steps have 8 nodes in place of 64",
    ]
    report = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert list(report["speculative"]["by_num_nodes"]) == ["4", "8"]
    assert report["settings"]["num_nodes"] == [4, 8]

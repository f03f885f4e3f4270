"""Work in a process of its own: results as they come, and every way to end."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from export.background import BackgroundProcess
from export.errors import ExportError
from export.options import Options
from runtime.bundle import Bundle


def squares(count: int) -> Iterator[int]:
    yield from (number**2 for number in range(count))


def refuses() -> Iterator[int]:
    yield 1
    raise ExportError("--step-nodes: no")


def is_killed() -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield 1


def survives_ctrl_c() -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGINT)
    yield 1


def never_ends() -> Iterator[int]:
    yield 1
    time.sleep(1000)


def test_results_come_in_order() -> None:
    seen: list[int] = []
    with BackgroundProcess(squares, (4,), seen.append) as process:
        assert process.results() == [0, 1, 4, 9]
    assert seen == [0, 1, 4, 9]


def test_errors_are_raised_here() -> None:
    with (
        pytest.raises(ExportError, match="--step-nodes: no"),
        BackgroundProcess(refuses, (), print) as process,
    ):
        process.results()


def test_an_error_of_the_callback_is_raised_here() -> None:
    def fails(_: int) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"), BackgroundProcess(squares, (2,), fails) as process:
        process.results()


def test_a_process_that_is_killed() -> None:
    with (
        pytest.raises(ExportError, match="ended with the status -9"),
        BackgroundProcess(is_killed, (), print) as process,
    ):
        process.results()


def test_ctrl_c_is_for_the_other_process() -> None:
    with BackgroundProcess(survives_ctrl_c, (), print) as process:
        assert process.results() == [1]


def test_leaving_the_block_ends_it() -> None:
    came: list[int] = []
    began = time.monotonic()
    with BackgroundProcess(never_ends, (), came.append):
        while not came and time.monotonic() - began < 60:
            time.sleep(0.01)
    assert came == [1]
    assert time.monotonic() - began < 60


def test_graphs_of_steps_are_the_same_from_another_process(
    tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path
) -> None:
    from export.build_engines import build

    bundles = []
    for parallel in (False, True):
        options = Options(step_nodes=(4, 8), parallel=parallel)
        out = tmp_path / str(parallel)
        bundles.append(build(tiny_model_dir, out, drafter_dir=tiny_drafter_dir, options=options))
    alone, beside = (list(bundle.manifest.graphs) for bundle in bundles)
    assert sorted(alone) == sorted(beside)
    for name in alone:
        same = [Bundle.load(bundle.path).path / f"{name}.onnx" for bundle in bundles]
        assert same[0].read_bytes() == same[1].read_bytes(), name

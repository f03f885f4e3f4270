"""Work in a process of its own: results as they come, and every way to end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from export.background import BackgroundProcess
from export.errors import ExportError
from export.forms import GraphForm
from export.graphs.contracts import target_model_contract
from export.quantisation.precision import Precision
from export.step.build import step_files
from export.verify.runner import onnx_runner
from runtime.core.bundle import Bundle
from tests.export.background_work import (
    is_killed,
    never_ends,
    raises_a_lock,
    raises_two_parts,
    refuses,
    squares,
    survives_ctrl_c,
)


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


@pytest.mark.parametrize(
    ("raises", "message"), [(raises_a_lock, "Locked: the reason"), (raises_two_parts, "TwoParts: a and b")]
)
def test_errors_that_cannot_be_pickled(raises: Callable[[], Iterator[int]], message: str) -> None:
    with (
        pytest.raises(ExportError, match=f"^{message}$"),
        BackgroundProcess(raises, (), print) as process,
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


def test_graphs_of_steps_come_from_another_process(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    """Without a head, so that there is little to trace."""
    model, form = Bundle.load(tiny_bundle_dir).manifest.model, GraphForm(Precision("float32"), "float32")
    arguments = (tmp_path, {"backbone": form}, model, target_model_contract(model), None, (0, 4))
    seen: list[str] = []
    with step_files(arguments, lambda graph: seen.append(graph.path.stem), parallel=True) as files:
        written = files()
    assert seen == [file.written.path.stem for file in written] == ["search_0", "accept", "accept_sampled"]
    for file in written:
        graph = file.written
        (difference,) = file.check(onnx_runner(graph.path, graph.contract, graph.precision)).values()
        assert difference < 1e-5

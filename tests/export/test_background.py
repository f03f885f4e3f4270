"""Work in a process of its own: results as they come, and every way to end."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from export.background import BackgroundProcess
from export.errors import ExportError
from export.forms import graph_forms
from export.graphs.contracts import target_model_contract
from export.heads import prepare_drafter
from export.options import Options
from export.precision import Precision
from export.source import load_source
from export.step.files import step_files
from runtime.bundle import Bundle
from tests.export.background_work import is_killed, never_ends, refuses, squares, survives_ctrl_c


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
    tiny_model_dir: Path,
    trained_heads_dir: Path,
    make_tiny_bundle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    head, options = trained_heads_dir / "ctc", Options(step_nodes=(4, 8))
    bundle = Bundle.load(make_tiny_bundle(head, options))
    source = load_source(tiny_model_dir, head)
    assert source.drafter is not None
    prepared = prepare_drafter(source.drafter, options)
    forms = graph_forms(source, options, Precision("float32"), Precision("float32"))
    drafter = (prepared.spec, prepared.contract)
    arguments = (tmp_path, forms, source.spec, target_model_contract(source.spec), drafter, (0, 4, 8))
    seen: list[str] = []
    with step_files(arguments, lambda graph: seen.append(graph.path.name), parallel=True) as files:
        written = files()
    assert seen == [file.written.path.name for file in written]
    assert {*bundle.manifest.graphs} == {
        *(name.removesuffix(".onnx") for name in seen),
        "backbone",
        "drafter",
    }
    for name in seen:
        assert (tmp_path / name).read_bytes() == (bundle.path / name).read_bytes(), name

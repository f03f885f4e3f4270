"""The weightless graphs of a step as files, which a process of its own may write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from export.background import BackgroundProcess
from export.forms import GraphFile, GraphForm, WrittenGraph, save_graph, step_form
from export.graphs.trace import silence_libraries
from export.step.build import step_graphs
from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec

Arguments = tuple[
    Path,
    dict[str, GraphForm],
    ModelSpec,
    GraphSpec,
    tuple[DrafterSpec, GraphSpec] | None,
    tuple[int, ...],
]


def write_step_graphs(
    directory: Path,
    forms: dict[str, GraphForm],
    model: ModelSpec,
    backbone: GraphSpec,
    drafter: tuple[DrafterSpec, GraphSpec] | None,
    step_nodes: tuple[int, ...],
) -> Iterator[GraphFile]:
    """Trace and write one graph after another; none if there are no sizes.

    forms: of the target model and the head, by the graphs' names
    The other arguments are those of ``step_graphs``.
    """
    for name, graph in step_graphs(model, backbone, drafter, step_nodes):
        path, form = directory / f"{name}.onnx", step_form(name, forms)
        written = save_graph(graph.model, graph.contract, path, form, has_weights=False)
        yield GraphFile(written, graph.check)


def _write_silently(*arguments: Any) -> Iterator[GraphFile]:
    silence_libraries()
    yield from write_step_graphs(*arguments)


@contextmanager
def step_files(
    arguments: Arguments, on_graph: Callable[[WrittenGraph], None], *, parallel: bool
) -> Iterator[Callable[[], list[GraphFile]]]:
    """What waits for the files that ``write_step_graphs`` writes, and returns them.

    on_graph: called with each as soon as it is written
    parallel: write them in a process of their own, beside what is done in the block
    """

    def written(file: GraphFile) -> None:
        on_graph(file.written)

    # The graphs of plain steps alone take less time than starting a process.
    if parallel and len(arguments[-1]) > 1:
        with BackgroundProcess(_write_silently, arguments, written) as process:
            yield process.results
        return
    files = []
    for file in write_step_graphs(*arguments):
        files.append(file)
        written(file)
    yield lambda: files

"""Which sizes of trees run where steps are graphs: those that were exported."""

from collections.abc import Sequence

from runtime.core.bundle import PLAIN, Bundle
from runtime.decode.step import StepRunner
from runtime.device.graph_step import GraphStep


def size_that_runs(step_nodes: Sequence[int], wanted: int) -> int:
    """The smallest exported size of at least ``wanted`` nodes, or else the largest: what ``GraphStep`` takes.

    step_nodes: ascending, of ``BundleManifest``
    """
    return next((size for size in step_nodes if size >= wanted), step_nodes[-1])


def explain_size(
    bundle: Bundle, runner: StepRunner, method: str | None, wanted: int
) -> tuple[int, str | None]:
    """The nodes that a step of ``wanted`` nodes has, and a line that says so where they are others."""
    step_nodes = bundle.manifest.step_nodes
    if not isinstance(runner, GraphStep) or method == PLAIN or bundle.manifest.drafter is None:
        return wanted, None
    size = size_that_runs(step_nodes, wanted)
    if size == wanted:
        return size, None
    sizes = ", ".join(str(each) for each in step_nodes if each)
    return (
        size,
        f"--num-nodes: steps have {size} nodes in place of {wanted}; the bundle has graphs for {sizes}",
    )

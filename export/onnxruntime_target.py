"""Engines for ONNX Runtime: the ONNX files themselves, with activations in float32."""

from pathlib import Path

from export.forms import graph_forms
from export.options import Options
from export.pipeline import CheckedGraphs, build_graphs
from export.precision import ONNXRUNTIME_PRECISIONS
from export.progress import Progress
from export.source import Source
from export.step.build import check_step_nodes
from runtime.core.bundle import MAX_NUM_NODES


def build_onnxruntime(source: Source, directory: Path, options: Options, progress: Progress) -> CheckedGraphs:
    """Write both graphs and compare them with PyTorch."""
    config = source.drafter.config if source.drafter else None
    step_nodes = check_step_nodes(options.step_nodes or (), config, options, MAX_NUM_NODES)
    precisions = (ONNXRUNTIME_PRECISIONS[name] for name in (options.precision, options.head_precision))
    forms = graph_forms(source, options, *precisions)
    return build_graphs(source, directory, options, forms, progress, step_nodes=step_nodes)

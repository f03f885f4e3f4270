"""The registry of engine targets. A target turns a source into engine files and checks them.

Command lines read the registry, so the functions that build engines import torch only when they are called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.config import DrafterConfig, DrafterConfigError
from drafters.head_types import AUTOREGRESSIVE, HEAD_TYPES
from export.errors import ExportError
from export.options import (
    BLOCKS,
    COLUMNS,
    FUSED,
    INT8_LM_HEAD,
    INVARIANT,
    Options,
    flag_of,
)
from export.quantisation.precision import (
    ACTIVATIONS,
    BFLOAT16_SCALES,
    HALF_SCALES,
    INT8_BLOCKS,
    INTEGER_PRODUCTS,
    ONNXRUNTIME_PRECISIONS,
    PRECISIONS,
    QUANTIZED,
    Precision,
    WeightForm,
)
from runtime.core.bundle import MAX_NUM_NODES, TORCH

if TYPE_CHECKING:
    from export.pipeline import CheckedGraphs, Progress
    from export.source import Source

# A head cannot change the text. With int4 weights a draft takes about 30 % less time on a CPU
# (docs/methods.md); on a GPU a step takes less by prediction alone (docs/gpu.md).
DEFAULT_HEAD_PRECISION = "int4"


@dataclass(frozen=True)
class Target:
    """A kind of engine, and the precisions that it can be built in.

    attention: the form that the target model's attention has unless the options say otherwise
    own_options: fields of ``Options`` that not every target reads, and this one does
    """

    name: str
    precisions: tuple[str, ...]
    attention: str
    build: Callable[[Source, Path, Options, Progress], CheckedGraphs]
    own_options: tuple[str, ...]

    def with_defaults(self, options: Options) -> Options:
        """The options, with this target's choices where they leave it to the target."""
        return replace(options, attention=options.attention or self.attention)

    def row_invariant(self, options: Options) -> bool:
        """Whether engines give a token the same bits in every pass; known only of ONNX Runtime's."""
        return self.attention == options.attention == INVARIANT

    def int8_products(self, options: Options) -> bool:
        """Whether engines multiply quantised weights of the target model with activations in int8.

        A text would depend on its drafts if passes did not give a token the same bits.
        """
        if options.float_products or not self.row_invariant(options):
            return False
        return ONNXRUNTIME_PRECISIONS[options.precision].weights is not None


def _onnxruntime(source: Source, directory: Path, options: Options, progress: Progress) -> CheckedGraphs:
    """The engines of ONNX Runtime are the checked ONNX files themselves, with activations in float32."""
    from export.forms import graph_forms
    from export.heads import check_step_nodes
    from export.pipeline import build_graphs

    config = source.drafter.config if source.drafter else None
    step_nodes = check_step_nodes(options.step_nodes or (), config, options, MAX_NUM_NODES)
    backbone, drafter = (ONNXRUNTIME_PRECISIONS[name] for name in (options.precision, options.head_precision))
    # The codes of a quantised checkpoint are kept, with the scales of their blocks.
    if options.precision == "int4":
        weights = WeightForm("int4", options.int4_block_size, HALF_SCALES)
        backbone = replace(backbone, weights=weights, is_smoothed=not source.has_codes)
        if options.lm_head is None and not source.has_codes:
            options = replace(options, lm_head=INT8_LM_HEAD)
    elif TARGETS["onnxruntime"].int8_products(options):
        if options.int8_scales == BLOCKS and options.calibration_text is not None:
            raise ExportError("--calibration-text: is for --int8-scales columns, got --int8-scales blocks")
        if not source.has_codes:
            backbone = INTEGER_PRODUCTS if options.int8_scales == COLUMNS else INT8_BLOCKS
    forms = graph_forms(source, options, backbone, drafter)
    return build_graphs(source, directory, options, forms, progress, step_nodes=step_nodes, merge=True)


def _torch(source: Source, directory: Path, options: Options, progress: Progress) -> CheckedGraphs:
    """PyTorch runs the checked ONNX files themselves, on a GPU."""
    from export.forms import graph_forms
    from export.heads import step_sizes
    from export.pipeline import build_graphs

    step_nodes = step_sizes(source.drafter.config if source.drafter else None, options, MAX_NUM_NODES)
    names = (options.precision, options.head_precision)
    floats = [name for name in names if name in ACTIVATIONS]
    usual = ACTIVATIONS[options.activations or next(iter(floats), "fp16")]
    backbone, drafter = (
        Precision(ACTIVATIONS[name]) if name in ACTIVATIONS else Precision(usual, BFLOAT16_SCALES)
        for name in names
    )
    forms = graph_forms(source, options, backbone, drafter, sliced=("backbone", "drafter"))
    return build_graphs(source, directory, options, forms, progress, step_nodes=step_nodes, merge=True)


def _tensorrt(
    name: str, source: Source, directory: Path, options: Options, progress: Progress
) -> CheckedGraphs:
    from export.trt.target import build_tensorrt

    return build_tensorrt(name, source, directory, options, progress)


OF_ONNXRUNTIME = ("float_products", "int8_scales", "int4_block_size")
OF_TENSORRT = ("activations", "gpus", "max_batch", "max_nodes", "gpu_memory", "timing_cache")
TARGETS = {
    target.name: target
    for target in (
        Target("onnxruntime", tuple(ONNXRUNTIME_PRECISIONS), INVARIANT, _onnxruntime, OF_ONNXRUNTIME),
        Target("tensorrt-rtx", PRECISIONS, FUSED, functools.partial(_tensorrt, "tensorrt-rtx"), OF_TENSORRT),
        Target("tensorrt", PRECISIONS, FUSED, functools.partial(_tensorrt, "tensorrt"), OF_TENSORRT),
        Target(TORCH, (*ACTIVATIONS, "int4"), FUSED, _torch, ("activations",)),
    )
}
# Fields of ``Options`` that do something with these precisions of the target model alone.
OF_PRECISIONS = {
    "lm_head": QUANTIZED,
    "quality_text": QUANTIZED,
    "float_products": ("int8", "int4"),
    "int8_scales": ("int8",),
    "int4_block_size": ("int4",),
    "calibration_text": ("int8", "int4"),
}
# Fields that draft heads alone read, and those that heads of one family read.
OF_LEVELS = ("beam_width", "min_level_probability")
OF_HEADS = ("drafter_precision", "top_k", *OF_LEVELS, "stream_pass", "kept_nodes")


# Engines of others, for which a draft directory is written (``export.draft_directory``): "module:function" of
# what writes it.
DRAFT_TARGETS = {
    "vllm": "export.vllm_target:build_vllm",
    "sglang": "export.sglang_target:build_sglang",
    "tensorrt-llm": "export.tensorrt_llm_target:build_tensorrt_llm",
    "edge-llm": "export.edge_llm_target:build_edge_llm",
}


def with_head_precision(options: Options, drafter_dir: Path | None) -> Options:
    """The options with DEFAULT_HEAD_PRECISION for a head, if they leave its precision open.

    Streams have the target model's precision, because they run through its layers.
    """
    if drafter_dir is None or options.drafter_precision is not None:
        return options
    try:
        borrows = DrafterConfig.load(drafter_dir).trunk_type.borrows_layers
    except DrafterConfigError:
        return options  # the build refuses the head with a reason
    return options if borrows else replace(options, drafter_precision=DEFAULT_HEAD_PRECISION)


def check_head_options(options: Options, drafter_dir: Path | None) -> None:
    """Refuse options that the head does not read, or that are given without a head. Raises ExportError.

    drafter_dir: of a head whose configuration can be read
    """
    head = None if drafter_dir is None else DrafterConfig.load(drafter_dir)
    for name in OF_HEADS:
        if getattr(options, name) == getattr(Options, name):
            continue
        if head is None:
            raise ExportError(f"{flag_of(name)}: is for a draft head, got no --drafter")
        if name in OF_LEVELS and head.family != AUTOREGRESSIVE:
            kinds = " and ".join(n for n, kind in HEAD_TYPES.items() if kind.family == AUTOREGRESSIVE)
            raise ExportError(f"{flag_of(name)}: is for {kinds} heads, got a {head.drafter_type} head")
    if head is not None:
        options.check_head(head)


def resolve(name: str, options: Options) -> Target:
    """The target called ``name``; for ``auto`` the first with these precisions. Raises ExportError."""
    if name not in ("auto", *TARGETS):
        known = ", ".join((*TARGETS, *DRAFT_TARGETS))
        raise ExportError(f"--target: must be auto or one of {known}, got {name!r}")
    candidates = list(TARGETS.values()) if name == "auto" else [TARGETS[name]]
    for flag, precision in (
        ("--precision", options.precision),
        ("--drafter-precision", options.head_precision),
    ):
        candidates, refused = [t for t in candidates if precision in t.precisions], candidates
        if not candidates:
            supported = "; ".join(f"{t.name} supports {', '.join(t.precisions)}" for t in refused)
            raise ExportError(f"{flag}: {supported}, got {precision!r}")
    chosen = candidates[0]
    if name == "auto" and "gpus" in chosen.own_options and not options.gpus:
        names = ", ".join(f"{t.name} with --gpu" if t is chosen else t.name for t in candidates)
        raise ExportError(f"--target: must be one of {names} for these precisions, got auto")
    _check_given(chosen, options, "auto, which is " + chosen.name if name == "auto" else name)
    return chosen


def _check_given(target: Target, options: Options, named: str) -> None:
    """Refuse what was given and would do nothing. Raises ExportError that calls the target ``named``."""
    for field in fields(Options):
        if getattr(options, field.name) == field.default:
            continue
        flag = flag_of(field.name)
        readers = [each.name for each in TARGETS.values() if field.name in each.own_options]
        if readers and target.name not in readers:
            raise ExportError(f"{flag}: is for --target {' or '.join(readers)}, got {named}")
        precisions = OF_PRECISIONS.get(field.name, PRECISIONS)
        if field.name == "quality_text" and options.quantize_embedding:
            continue  # which is measured as well
        if options.precision not in precisions:
            expected = " or ".join(precisions)
            raise ExportError(f"{flag}: is for --precision {expected}, got {options.precision}")
    used = (options.precision, options.head_precision)
    if options.activations and not {*used} & {*QUANTIZED}:
        quantized = ", ".join(QUANTIZED)
        raise ExportError(f"--activations: is for the precisions {quantized}, got {options.precision}")
    if options.lm_head == INT8_LM_HEAD and (options.precision != "int4" or target.name != "onnxruntime"):
        raise ExportError(
            f"--lm-head: int8 is for --precision int4 and --target onnxruntime, got {options.precision} and "
            f"{named}"
        )
    options = target.with_defaults(options)
    if target.int8_products(options):
        return
    # The text also rounds weights in int4, for every target.
    for name in ("int8_scales",) if options.precision == "int4" else ("int8_scales", "calibration_text"):
        if getattr(options, name) != getattr(Options, name):
            if options.float_products:
                cause = "--float-products turns off"
            elif target.attention == INVARIANT:
                cause = f"--attention {options.attention} turns off"
            else:
                cause = f"{target.name} has not"
            raise ExportError(f"{flag_of(name)}: is for products in int8, which {cause}")

"""The registry of engine targets. A target turns a source into engine files and checks them.

Command lines read the registry, so what builds engines, which imports torch, is imported when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.options import Options
from export.precision import ONNXRUNTIME_PRECISIONS, PRECISIONS

if TYPE_CHECKING:
    from export.pipeline import CheckedGraphs, Progress
    from export.source import Source


@dataclass(frozen=True)
class Target:
    """A kind of engine, and the precisions that it can be built in."""

    name: str
    precisions: tuple[str, ...]
    build: Callable[[Source, Path, Options, Progress], CheckedGraphs]


def _onnxruntime(source: Source, directory: Path, options: Options, progress: Progress) -> CheckedGraphs:
    from export.onnxruntime_target import build_onnxruntime

    return build_onnxruntime(source, directory, options, progress)


def _tensorrt(
    name: str, source: Source, directory: Path, options: Options, progress: Progress
) -> CheckedGraphs:
    from export.trt.target import build_tensorrt

    return build_tensorrt(name, source, directory, options, progress)


TARGETS = {
    target.name: target
    for target in (
        Target("onnxruntime", tuple(ONNXRUNTIME_PRECISIONS), _onnxruntime),
        Target("tensorrt-rtx", PRECISIONS, functools.partial(_tensorrt, "tensorrt-rtx")),
        Target("tensorrt", PRECISIONS, functools.partial(_tensorrt, "tensorrt")),
    )
}


def resolve(name: str, options: Options) -> Target:
    """The target called ``name``; for ``auto`` the first with these precisions. Raises ExportError."""
    if name not in ("auto", *TARGETS):
        raise ExportError(f"--target: must be auto or one of {', '.join(TARGETS)}, got {name!r}")
    candidates = list(TARGETS.values()) if name == "auto" else [TARGETS[name]]
    for flag, precision in (
        ("--precision", options.precision),
        ("--drafter-precision", options.head_precision),
    ):
        candidates, refused = [t for t in candidates if precision in t.precisions], candidates
        if not candidates:
            supported = "; ".join(f"{t.name} supports {', '.join(t.precisions)}" for t in refused)
            raise ExportError(f"{flag}: {supported}, got {precision!r}")
    return candidates[0]

"""The engines of this runtime: what runs a bundle's graphs, in steps on the host and on a device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from runtime.core.bundle import TORCH, Bundle
from runtime.core.errors import BundleError
from runtime.device import tensorrt
from runtime.device.device import Device, MakeEngine, OpenDevice
from runtime.device.ort import open_ort
from runtime.engines import ort
from runtime.engines.protocol import MakeHostEngine

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRecord:
    """What runs the graphs of a target's bundles. Where its library is missing, the first use says so.

    suffix: of the file that holds a graph, after the graph's name
    on_host: makes a graph's engine for steps on the host; None where no such step runs
    on_device: opens a device for graph steps; None where no such step runs
    """

    suffix: str
    on_host: MakeHostEngine | None
    on_device: OpenDevice | None


def _open_torch(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, MakeEngine]:
    """Nothing but ``runtime.device.pytorch`` imports torch, so that only these bundles need it."""
    try:
        from runtime.device.pytorch.engine import open_torch
    except ImportError as error:
        raise BundleError(
            f"target {TORCH}: {error.name} cannot be imported; pip install -c constraints.txt "
            f"-e '.[torch-gpu]' brings it: {error}"
        ) from error
    return open_torch(bundle, device, num_threads)


# For every export target whose bundles this runtime runs, by ``BundleManifest.target``.
ENGINES: dict[str, EngineRecord] = {
    "onnxruntime": EngineRecord(ort.SUFFIX, ort.make_host_engine, open_ort),
    # On the host ONNX Runtime runs the same files, as a reference.
    TORCH: EngineRecord(ort.SUFFIX, ort.make_host_engine, _open_torch),
    "tensorrt-rtx": EngineRecord(tensorrt.SUFFIX, None, partial(tensorrt.open_tensorrt, "tensorrt-rtx")),
    "tensorrt": EngineRecord(tensorrt.SUFFIX, None, partial(tensorrt.open_tensorrt, "tensorrt")),
}


def host_engine(bundle: Bundle) -> MakeHostEngine:
    """What makes engines of a bundle's graphs for steps on the host. Raises BundleError if nothing does."""
    return _of_target(bundle, {target: record.on_host for target, record in ENGINES.items()}, "the host")


def device_opener(bundle: Bundle) -> OpenDevice:
    """What opens a device for a bundle's graph steps. Raises BundleError if nothing does."""
    return _of_target(bundle, {target: record.on_device for target, record in ENGINES.items()}, "a device")


def _of_target(bundle: Bundle, found: Mapping[str, T | None], place: str) -> T:
    target = bundle.manifest.target
    value = found.get(target)
    if value is None:
        known = ", ".join(name for name, each in found.items() if each is not None)
        raise BundleError(f"target: this runtime runs {known} on {place}, got {target!r}")
    return value


def check_files(bundle: Bundle, graphs: Iterable[str]) -> None:
    """Raises BundleError for a graph whose file the bundle lacks. Its target is one of ``ENGINES``."""
    for name in (f"{graph}{ENGINES[bundle.manifest.target].suffix}" for graph in graphs):
        if not (bundle.path / name).is_file():
            raise BundleError(f"{bundle.path}: {name} is missing")

"""Kernels as the engine of a step-logic graph."""

from collections.abc import Mapping

from runtime.core.bundle import BundleManifest
from runtime.device.device import Device, DeviceArray, DeviceEngine, Launch, MakeEngine
from runtime.device.kernels.arguments import Launcher
from runtime.device.kernels.stages import THREADS, Stage, stage_of


class KernelEngine:
    """A ``DeviceEngine`` that launches kernels in place of a graph."""

    def __init__(self, device: Device, launcher: Launcher, stage: Stage):
        self._device = device
        self._launcher = launcher
        self._stage = stage
        # Memory of its own, which all passes share, since they run one after another.
        self._scratch: dict[str, DeviceArray] = {}

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        launches = self._stage.launches(arrays, self._memory)

        def run() -> None:
            for each in launches:
                self._launcher.launch(each)

        return run

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        self.bind(arrays)()

    def _memory(self, name: str, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        wanted = DeviceArray(0, shape, dtype)
        if name not in self._scratch or self._scratch[name].nbytes < wanted.nbytes:
            # An earlier pass keeps the smaller array.
            self._scratch[name] = self._device.allocate(shape, dtype)
        return self._scratch[name].view(shape)


def with_kernels(
    device: Device, launcher: Launcher, manifest: BundleManifest, make: MakeEngine, *, threads: int = THREADS
) -> MakeEngine:
    """Makes engines of kernels for the graphs that they compute in sizes that fit, and others by ``make``.

    threads: as of ``stage_of``
    """

    def made(name: str) -> DeviceEngine:
        stage = stage_of(name, manifest.graphs[name], manifest.drafter, threads=threads)
        if stage is None or stage.shared_bytes > launcher.max_shared_bytes:
            return make(name)
        return KernelEngine(device, launcher, stage)

    return made

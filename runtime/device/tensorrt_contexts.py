"""Execution contexts of TensorRT's engines, and what those of one device share."""

from typing import Any

from runtime.core.errors import DeviceError
from runtime.device.cuda_device import CudaDevice
from runtime.device.device import DeviceArray


class Context:
    """An execution context, and the profile it was switched to.

    needed: what the library wants to live as long
    """

    def __init__(self, library: Any, *needed: Any):
        self.library = library
        self.profile: int | None = None
        self._needed = needed

    def can_be_captured(self, stream: int) -> bool:
        """Whether the library can record the next pass. TensorRT, unlike that for RTX, always can."""
        ask = getattr(self.library, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))


class ContextFactory:
    """Makes the execution contexts of one device's engines.

    trt: the library's module

    All contexts share their scratch memory, which they may because one stream does their passes one after
    another. It is allocated with the first context, as large as the largest engine wants it that was added
    before, and it never moves, since contexts and captured steps keep its address.

    TensorRT for RTX compiles kernels while it runs. Its contexts share a cache of compiled kernels, since
    most of them differ in little but their shapes. A context has kernels for its very shapes from its first
    pass on: the library would otherwise begin with general ones and compile in the background, and a step
    that is captured meanwhile would keep the general ones for ever, if it could be captured at all.
    """

    def __init__(self, trt: Any, device: CudaDevice):
        self._trt = trt
        self._device = device
        self._cache: Any = None
        self._scratch_size = 0
        self._scratch: DeviceArray | None = None

    def add(self, engine: Any) -> None:
        """Tell of an engine, for which contexts will be made. All are to be added before the first is."""
        self._scratch_size = max(self._scratch_size, int(engine.device_memory_size_v2))

    def make(self, engine: Any, name: str) -> Context:
        """A context of an engine that was added; ``name`` is what messages call the engine."""
        self._device.select()
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        settings = managed
        # TensorRT has no such strategies.
        if hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):
            settings = self._settings(engine, managed, name)
        library = engine.create_execution_context(settings)
        if library is None:
            memory = self._device.describe_memory()
            raise DeviceError(f"{name}: the library cannot create an execution context; {memory}")
        if self._scratch is None or self._scratch.nbytes < self._scratch_size:
            # Contexts that were made before an engine was added late go on in the smaller memory.
            self._scratch = self._device.allocate((self._scratch_size,), "bool")
        library.set_device_memory(self._scratch.address, self._scratch.nbytes)
        return Context(library, settings, self._cache)

    def _settings(self, engine: Any, managed: Any, name: str) -> Any:
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(managed)
        strategies = self._trt.DynamicShapesKernelSpecializationStrategy
        settings.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
        if not settings.set_runtime_cache(self._cache):
            raise DeviceError(f"{name}: the library refuses its own cache of compiled kernels")
        return settings

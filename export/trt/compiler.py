"""Compile one ONNX file into a TensorRT engine."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from export.errors import ExportError
from export.trt.library import Library
from runtime.bundle import EngineProfile, GraphSpec

# What every build on a machine without a GPU says, whatever else is wrong.
NO_DRIVER = "cudaError 35"


@dataclass(frozen=True)
class CompiledEngine:
    """What the compiler made of a graph.

    plan: the serialised engine
    activation_bytes: scratch memory that a pass needs, by the builder
    layers: of the network that was parsed, how many there are of each kind, such as MATRIX_MULTIPLY; the
        kernels that the compiler makes of them are not known without a GPU
    """

    plan: memoryview
    activation_bytes: int
    layers: Mapping[str, int]


def compile_engine(
    library: Library,
    path: Path,
    contract: GraphSpec,
    profiles: tuple[EngineProfile, ...],
    *,
    capabilities: tuple[str, ...] = (),
    timing_cache: Path | None = None,
) -> CompiledEngine:
    """Parse and build, with a progress bar on stderr.

    timing_cache: a file that is read if it exists and written afterwards, which makes later builds faster
    Raises ExportError with one line that names the node and operator which the compiler refuses, and
    KeyboardInterrupt after Ctrl-C, which cancels the build.
    """
    trt, log = library.trt, library.log
    log.clear()
    builder = trt.Builder(log)
    network = builder.create_network(_strongly_typed(trt))
    _parse(library, network, path)
    layers = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    if any(tensor.dtype == "float32" for tensor in contract.inputs if tensor.name.startswith("past_")):
        _decompose_attention(trt, network)
    config = builder.create_builder_config()
    if library.compiles_ahead:
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, capability.upper()), index)
        # Without it TensorRT for RTX may allocate during a pass, which a captured CUDA graph must not.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, contract, profile))
    cache = _load_timing_cache(config, timing_cache)
    with _progress(trt, path.stem) as monitor:
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        if monitor.cancelled:
            raise KeyboardInterrupt
        raise ExportError(f"{path.name}: {library.name} cannot build it: {_first_error(log.errors)}")
    if timing_cache and cache is not None:
        _save_timing_cache(cache, timing_cache)
    return CompiledEngine(memoryview(plan), log.activation_bytes, layers)


def _strongly_typed(trt: Any) -> int:
    """Types are those of the ONNX graph; newer libraries have no other networks and no flag for it."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(library: Library, network: Any, path: Path) -> None:
    parser = library.trt.OnnxParser(network, library.log)
    if parser.parse_from_file(str(path)):
        return
    if not parser.num_errors:
        raise ExportError(f"{path.name}: {library.name} cannot read it: {_first_error(library.log.errors)}")
    error = parser.get_error(0)
    raise ExportError(
        f"{path.name}: {library.name} cannot take the node {error.node_name()} ({error.node_operator()}): "
        f"{_first_error([error.desc()])}"
    )


def _first_error(messages: list[str]) -> str:
    """The first line that says what is wrong."""
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line for line in lines if line and NO_DRIVER not in line), "no reason was given")


def _decompose_attention(trt: Any, network: Any) -> None:
    """There is no fused kernel for float32, so the compiler has to take Attention apart."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _profile(builder: Any, contract: GraphSpec, profile: EngineProfile) -> Any:
    result = builder.create_optimization_profile()
    for tensor in contract.inputs:
        if all(isinstance(size, int) for size in tensor.shape):
            continue
        shapes = [
            [profile[size][bound] if isinstance(size, str) else size for size in tensor.shape]
            for bound in range(3)
        ]
        result.set_shape(tensor.name, *shapes)
    return result


@contextmanager
def _progress(trt: Any, name: str) -> Iterator[Any]:
    """A monitor that shows a bar, and cancels the build after Ctrl-C."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self.bar = tqdm(desc=f"compiling {name}", unit=" steps", leave=False)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.bar.reset(total=steps)
            self.bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            self.bar.update()
            return not self.cancelled

        def phase_finish(self, phase: str) -> None:
            pass

    monitor = Monitor()

    def cancel(*_: object) -> None:
        monitor.cancelled = True

    # An exception must not pass through the compiler's own frames.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, cancel) if in_main_thread else None
    try:
        yield monitor
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)
        monitor.bar.close()


def _load_timing_cache(config: Any, path: Path | None) -> Any:
    if path is None:
        return None
    content = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(content)
    # A cache of another version of the library is of no use.
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _save_timing_cache(cache: Any, path: Path) -> None:
    scratch = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(bytes(cache.serialize()))
        scratch.replace(path)
    except OSError as error:
        raise ExportError(f"--timing-cache: {path} cannot be written: {error.strerror}") from error

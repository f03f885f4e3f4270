"""Compile ONNX files into TensorRT engines, with one of NVIDIA's two compilers.

TensorRT for RTX compiles ahead of time for the GPUs that are named, on a machine with or without a GPU.
TensorRT compiles for the GPU it runs on. Both libraries are imported only here, and only when asked for.
"""

import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from export.errors import ExportError
from runtime.core.bundle import EngineProfile, GraphSpec
from runtime.core.errors import BundleError
from runtime.core.system import replace_file
from runtime.device.tensorrt import ATTENTION_QUERY, import_tensorrt_module

# Every build on a machine without a GPU logs this, so it is never the reason of a failure.
NO_DRIVER = "cudaError 35"
RTX = "tensorrt-rtx"
# The least compute capability on which a type is computed with.
LEAST_CAPABILITY = {"bf16": 80, "fp8": 89}


@dataclass(frozen=True)
class Library:
    """An imported compiler.

    trt: the Python module
    log: collects its messages; one logger serves the whole process, because TensorRT ignores a second one
    """

    target: str
    trt: Any
    log: Any

    @property
    def name(self) -> str:
        return f"{self.target} {self.trt.__version__}"

    @property
    def compiles_ahead(self) -> bool:
        """Whether it compiles for GPUs that are named, in place of the one it runs on."""
        return self.target == RTX

    def capabilities(self) -> tuple[str, ...]:
        """The GPUs that may be named, such as ``sm89``."""
        if not self.compiles_ahead:
            return ()
        names = self.trt.ComputeCapability.__members__
        return tuple(sorted((n.lower() for n in names if re.fullmatch(r"SM\d+", n)), key=capability_number))


def capability_number(capability: str) -> int:
    """89 for ``sm89``."""
    return int(capability.removeprefix("sm"))


@functools.cache
def load_library(target: str) -> Library:
    """Import the compiler of a target. Raises ExportError, which names the extra to install."""
    try:
        trt = import_tensorrt_module(target)
    except BundleError as error:
        raise ExportError(f"--{error}") from error
    return Library(target, trt, _make_log(trt))


def check_capabilities(library: Library, capabilities: tuple[str, ...], precisions: tuple[str, ...]) -> None:
    """Raises ExportError for a GPU that the library does not know or that lacks a precision."""
    if not library.compiles_ahead:
        if capabilities:
            raise ExportError(f"--gpu: {library.target} compiles for the GPU it runs on, got --gpu")
        return
    known = library.capabilities()
    if not capabilities:
        raise ExportError(f"--gpu: {library.target} needs the GPUs to compile for, of {', '.join(known)}")
    for capability in capabilities:
        if capability not in known:
            raise ExportError(
                f"--gpu: {library.name} compiles for {', '.join(known)}, got {capability!r}; the data-centre "
                "GPUs of sm90 and sm100 need --target tensorrt on that GPU"
            )
        for precision in precisions:
            least = LEAST_CAPABILITY.get(precision, 0)
            if capability_number(capability) < least:
                raise ExportError(f"--gpu: {precision} needs sm{least} or later, got {capability}")


def _make_log(trt: Any) -> Any:
    class Log(trt.ILogger):
        """Keeps the errors, and the memory that the builder reports."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.activation_bytes = 0

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            found = re.match(r"Total Activation Memory: (\d+) bytes", message)
            if found:
                # It is reported for one profile after another.
                self.activation_bytes = max(self.activation_bytes, int(found[1]))

        def clear(self) -> None:
            self.errors, self.activation_bytes = [], 0

    return Log()


@dataclass(frozen=True)
class CompiledEngine:
    """A compiled graph.

    plan: the serialised engine
    activation_bytes: scratch memory that a pass needs, by the builder
    layers: of the network that was parsed, how many there are of each kind, such as MATRIX_MULTIPLY; the
        kernels that the compiler makes of them are not known without a GPU
    """

    plan: memoryview
    activation_bytes: int
    layers: Mapping[str, int]


class EngineCompiler:
    """Compiles one file after another in a thread, while the caller traces the next one.

    with EngineCompiler(library, capabilities=("sm89",)) as compiler:
        engine = compiler.submit(path, contract, profiles)
        engine.result()

    timing_cache: a file that is read if it exists and written afterwards, which makes later builds faster
    Leaving the block cancels what has not been finished. So does Ctrl-C, which leaves the block: an exception
    must not pass through the compiler's own frames, and none arises in its thread.
    """

    def __init__(
        self, library: Library, *, capabilities: tuple[str, ...] = (), timing_cache: Path | None = None
    ):
        self._library = library
        self._capabilities = capabilities
        self._timing_cache = timing_cache
        self._cancelled = threading.Event()
        # The library has one logger in a process, so that two builds at a time would mix their messages.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled.set()
        self._thread.shutdown(cancel_futures=True)

    def submit(
        self, path: Path, contract: GraphSpec, profiles: tuple[EngineProfile, ...]
    ) -> Future[CompiledEngine]:
        """Parse and build, with a progress bar on stderr.

        The result raises ExportError with one line that names the node and operator which the compiler
        refuses.
        """
        return self._thread.submit(self._compile, path, contract, profiles)

    def _compile(
        self, path: Path, contract: GraphSpec, profiles: tuple[EngineProfile, ...]
    ) -> CompiledEngine:
        library, trt, log = self._library, self._library.trt, self._library.log
        log.clear()
        builder = trt.Builder(log)
        network = builder.create_network(_strongly_typed(trt))
        _parse(library, network, path)
        layers = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
        if any(tensor.dtype == "float32" for tensor in contract.inputs if tensor.name.startswith("past_")):
            _decompose_attention(trt, network)
        else:
            read_caches_in_place(trt, network)
        config = builder.create_builder_config()
        if library.compiles_ahead:
            config.num_compute_capabilities = len(self._capabilities)
            for index, capability in enumerate(self._capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, capability.upper()), index)
            # Without it TensorRT for RTX may allocate during a pass, which a captured CUDA graph must not.
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        # By default products in float32 would be rounded to ten bits, more than the comparison allows.
        config.clear_flag(trt.BuilderFlag.TF32)
        for profile in profiles:
            config.add_optimization_profile(_profile(builder, contract, profile))
        cache = _load_timing_cache(config, self._timing_cache)
        with _progress(trt, path.stem, self._cancelled) as monitor:
            config.progress_monitor = monitor
            plan = builder.build_serialized_network(network, config)
        if plan is None:
            if self._cancelled.is_set():
                raise ExportError(f"{path.name}: cancelled")
            raise ExportError(f"{path.name}: {library.name} cannot build it: {_first_error(log.errors)}")
        if self._timing_cache and cache is not None:
            _save_timing_cache(cache, self._timing_cache)
        return CompiledEngine(memoryview(plan), log.activation_bytes, layers)


def compile_engine(
    library: Library,
    path: Path,
    contract: GraphSpec,
    profiles: tuple[EngineProfile, ...],
    *,
    capabilities: tuple[str, ...] = (),
) -> CompiledEngine:
    """Compile a single file."""
    with EngineCompiler(library, capabilities=capabilities) as compiler:
        return compiler.submit(path, contract, profiles).result()


def _strongly_typed(trt: Any) -> int:
    """The flag for networks with the types of the ONNX graph; newer libraries make no others and lack it."""
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
    """The first line that gives a reason."""
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line for line in lines if line and NO_DRIVER not in line), "no reason was given")


def _decompose_attention(trt: Any, network: Any) -> None:
    """Allow the compiler to decompose Attention, because there is no fused kernel for float32."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def read_caches_in_place(trt: Any, network: Any) -> None:
    """Let the attention of a parsed network read whole caches in place, up to the length in use.

    Each query becomes an output of the network. Where the compiler (TensorRT for RTX 1.7) may merge the
    computation of the query into attention, the memory it reports has room for keys and values of every
    query head; this way it has none for them. Kernels also learn how many positions of each sequence hold
    keys, so that they need not read the others.
    """
    producers = {}
    attentions = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for output in range(layer.num_outputs):
            producers[layer.get_output(output).name] = layer
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            attentions.append(layer)

    def unscaled(tensor: Any) -> tuple[Any, list[Any]]:
        """What the parser multiplied by a root of the scale, and that root, if it did."""
        product = producers.get(tensor.name)
        if product is None or product.type != trt.LayerType.ELEMENTWISE:
            return tensor, []
        factor = product.get_input(1)
        return (product.get_input(0), [factor]) if tuple(factor.shape) == (1, 1, 1, 1) else (tensor, [])

    for index, layer in enumerate(attentions):
        (query, of_query), (key, of_key) = unscaled(layer.get_input(0)), unscaled(layer.get_input(1))
        update = producers.get(key.name)
        if update is None or update.type != trt.LayerType.KV_CACHE_UPDATE or query.shape[1] == key.shape[1]:
            continue
        query = _add_scaled(trt, network, query, [*of_query, *of_key])
        query.name = f"{ATTENTION_QUERY}{index}"
        network.mark_output(query)
        layer.set_input(0, query)
        layer.set_input(1, key)
        if not hasattr(trt.IAttention, "key_value_lengths"):  # an older TensorRT
            continue
        layer.__class__ = trt.IAttentionInputLayer
        # Not all layers write as many positions: the upper ones of a graph with streams write more.
        lengths = _add_lengths(trt, network, update.get_input(2), update.get_input(1))
        layer.attention.key_value_lengths = lengths


def _add_scaled(trt: Any, network: Any, query: Any, factors: list[Any]) -> Any:
    """The query times all factors, in float32: the compiler fails at such an output in bfloat16."""
    product = network.add_cast(query, trt.float32).get_output(0)
    for factor in factors:
        factor = network.add_cast(factor, trt.float32).get_output(0)
        product = network.add_elementwise(product, factor, trt.ElementWiseOperation.PROD).get_output(0)
    return network.add_cast(product, query.dtype).get_output(0)


def _add_lengths(trt: Any, network: Any, first: Any, keys: Any) -> Any:
    """Positions in use [B] int32 after an update with keys [B, H, N, D] from positions ``first`` [B]."""
    shape = network.add_shape(keys).get_output(0)
    count = network.add_slice(shape, (2,), (1,), (1,)).get_output(0)
    first, count = (network.add_cast(each, trt.int32).get_output(0) for each in (first, count))
    return network.add_elementwise(first, count, trt.ElementWiseOperation.SUM).get_output(0)


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
def _progress(trt: Any, name: str, cancelled: threading.Event) -> Iterator[Any]:
    """A monitor that shows a bar, and ends the build when it has been cancelled."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.bar = tqdm(desc=f"compiling {name}", unit=" steps", leave=False)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.bar.reset(total=steps)
            self.bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            self.bar.update()
            return not cancelled.is_set()

        def phase_finish(self, phase: str) -> None:
            pass

    monitor = Monitor()
    try:
        yield monitor
    finally:
        monitor.bar.close()


def check_timing_cache(path: Path) -> None:
    """Raises ExportError if the file cannot be written; called before hours of compiling."""
    if path.is_dir():
        raise ExportError(f"--timing-cache: {path} is a directory; expected a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"--timing-cache: {path} cannot be written: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise ExportError(f"--timing-cache: {path.parent} cannot be written; choose another directory")


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
    try:
        replace_file(path, bytes(cache.serialize()))
    except OSError as error:
        raise ExportError(f"--timing-cache: {path} cannot be written: {error.strerror}") from error

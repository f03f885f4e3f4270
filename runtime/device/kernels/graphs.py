"""From a step-logic graph and its arrays to the launches that compute the same.

Where a function here returns None, the kernels do not support the graph's sizes, and the graph itself runs.
Array names, shapes and types are those of the graph's contract (``export.step.contracts``).
"""

from collections.abc import Callable, Mapping
from ctypes import Structure
from dataclasses import dataclass

from runtime.core.bundle import BundleManifest, DrafterSpec, GraphSpec
from runtime.core.prefix_search import kept_prefixes
from runtime.device.device import ITEM_SIZES, Device, DeviceArray, DeviceEngine, Launch, MakeEngine
from runtime.device.kernels.arguments import (
    MAX_CACHES,
    MAX_LEVELS,
    AcceptArguments,
    CommitArguments,
    DrawArguments,
    KernelLaunch,
    Launcher,
    LevelsArguments,
    PrepareArguments,
    SearchArguments,
)

Arrays = Mapping[str, DeviceArray]
# Memory of the kernels' own, by name, shape and type.
Scratch = Callable[[str, tuple[int, ...], str], DeviceArray]

# Threads of a block that searches or draws, and the most that the sources allow.
THREADS = 512
# Threads of a block that copies or walks.
FEW_THREADS = 128
# Bytes of a mask that one block writes.
MASK_BYTES = 16384
# As in the sources: prefixes of a tile, tokens whose weights are added up first, thresholds of a pass.
TILE, VOCABULARY_BLOCK, THRESHOLDS = 30, 256, 15


@dataclass(frozen=True)
class GraphKernels:
    """How a graph runs as kernels.

    shared_bytes: what the largest of its launches needs
    launches: of a pass with these arrays
    """

    shared_bytes: int
    launches: Callable[[Arrays, Scratch], list[KernelLaunch]]


def graph_kernels(
    graph: str, contract: GraphSpec, spec: DrafterSpec | None, *, threads: int = THREADS
) -> GraphKernels | None:
    """The kernels of a graph, by its name in a bundle; None for one that the kernels do not compute.

    spec: of the bundle's draft head
    threads: of a block that searches or draws, a power of two from 32 on
    """
    if graph == "prepare" and spec:
        return GraphKernels(0, _prepare_launches)
    if graph.startswith("search_"):
        names = {tensor.name for tensor in contract.inputs}
        if "child_tokens_0" in names:
            return _level_search(contract, threads)
        return _search(contract, spec.merges_repeats if spec else False, threads)
    if graph == "accept":
        return _accept(contract)
    if graph == "accept_sampled":
        return _sampled_accept(contract, threads)
    return _commit(contract) if graph == "commit" else None


def _address(arrays: Arrays, name: str) -> int | None:
    return arrays[name].address if name in arrays else None


def _fill(arguments: Structure, arrays: Arrays, **numbers: int) -> None:
    """Set the numbers, and the address of every array that a field is named after."""
    for name, kind in arguments._fields_:  # type: ignore[misc]
        if name in numbers:
            setattr(arguments, name, numbers[name])
        elif name in arrays and kind.__name__ == "c_void_p":
            setattr(arguments, name, arrays[name].address)


def _mask_blocks(rows: int, capacity: int) -> int:
    return -(-rows * capacity // MASK_BYTES)


def _cut(*arrays: tuple[int, int]) -> int:
    """Bytes of arrays of so many elements of so many bytes, as ``Cutter`` in the sources cuts them."""
    return sum(-(-count * size // 8) * 8 for count, size in arrays)


def _nodes_bytes(size: int) -> int:
    """Of ``cut_nodes`` in the sources."""
    return _cut(*[(size, 4)] * 4, (size * -(-size // 32), 4))


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _prepare_launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
    arguments = PrepareArguments()
    mask, count = arrays.get("attn_mask"), arrays["counts"].shape[0]
    context, frames = arrays.get("context_position_ids"), arrays.get("frame_position_ids")
    _fill(
        arguments,
        arrays,
        num_places=context.shape[1] if context else 0,
        num_frames=frames.shape[1] if frames else 0,
        num_rows=mask.shape[2] if mask else 0,
        capacity=mask.shape[3] if mask else 0,
    )
    blocks = 1 + (_mask_blocks(mask.shape[2], mask.shape[3]) if mask else 0)
    return [KernelLaunch("prepare", (blocks, count, 1), FEW_THREADS, 0, arguments)]


def _fixed_shapes(contract: GraphSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors without the first axis, as far as all their other axes are fixed."""
    shapes = {}
    for tensor in (*contract.inputs, *contract.outputs):
        axes = tuple(axis for axis in tensor.shape[1:] if isinstance(axis, int))
        if len(axes) == len(tensor.shape) - 1:
            shapes[tensor.name] = axes
    return shapes


def _search(contract: GraphSpec, merges_repeats: bool, threads: int) -> GraphKernels | None:
    """Without a lattice it is the search of plain steps, whose tree is the root alone."""
    shapes = _fixed_shapes(contract)
    (size,) = shapes["input_ids"]
    num_frames, labels = shapes.get("frame_tokens", (0, 0))
    following = shapes.get("transition_following", (0, 0, 0))
    kept, transition = kept_prefixes(size - 1) if num_frames else 1, following[-1]
    candidates = kept * (labels + 1)
    shared_bytes = _nodes_bytes(size) + _cut(
        *[(kept, 4)] * 14,
        *((labels, 4), (labels + 1, 4), (candidates, 4), (kept * labels, 4)),
        *[(kept, 4)] * 3,
        *((1, 4), (1, 4), (TILE * (transition + 1), 4), (following[1] * (transition + 1), 4)),
        (_power_of_two(candidates) if num_frames else 0, 8),
    )

    def launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
        arguments = SearchArguments()
        count, _, rows, capacity = arrays["attn_mask"].shape
        _fill(
            arguments,
            arrays,
            num_frames=num_frames,
            num_labels=labels,
            size=size,
            num_kept=kept,
            transition_size=transition,
            num_following=following[1],
            merges_repeats=int(merges_repeats),
            capacity=capacity,
        )
        grid = (1 + _mask_blocks(rows, capacity), count, 1)
        return [KernelLaunch("search", grid, threads if num_frames else 32, shared_bytes, arguments)]

    return GraphKernels(shared_bytes, launches)


def _level_search(contract: GraphSpec, threads: int) -> GraphKernels | None:
    shapes = _fixed_shapes(contract)
    (size,) = shapes["input_ids"]
    num_levels = sum(name.startswith("child_tokens_") for name in shapes)
    _, width = shapes["child_tokens_0"]
    beam_width = shapes["child_tokens_1"][0] if num_levels > 1 else 0
    if num_levels > MAX_LEVELS:
        return None
    candidates = _power_of_two(width * (1 + (num_levels - 1) * beam_width))
    shared_bytes = _nodes_bytes(size) + _cut((candidates, 8))

    def launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
        arguments = LevelsArguments()
        count, _, rows, capacity = arrays["attn_mask"].shape
        _fill(
            arguments,
            arrays,
            num_levels=num_levels,
            width=width,
            beam_width=beam_width,
            size=size,
            capacity=capacity,
        )
        for depth in range(num_levels):
            level = arguments.levels[depth]
            level.tokens = _address(arrays, f"child_tokens_{depth}")
            level.log_probs = _address(arrays, f"child_logprobs_{depth}")
            level.scores = _address(arrays, f"frontier_scores_{depth}")
            level.chosen = _address(arrays, f"chosen_{depth}")
        grid = (1 + _mask_blocks(rows, capacity), count, 1)
        return [KernelLaunch("search_levels", grid, threads, shared_bytes, arguments)]

    return GraphKernels(shared_bytes, launches)


def _accept(contract: GraphSpec) -> GraphKernels:
    (length,) = _fixed_shapes(contract)["path"]

    def launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
        return [_accept_launch(arrays, arrays["next_tokens"], None, length)]

    return GraphKernels(_cut((length, 4)), launches)


def _accept_launch(
    arrays: Arrays, choices: DeviceArray, log_probs: DeviceArray | None, length: int
) -> KernelLaunch:
    """log_probs: of the choices, where the new tokens' are wanted"""
    arguments = AcceptArguments()
    count, size = arrays["input_ids"].shape
    _fill(arguments, arrays, num_nodes=size, num_places=length)
    arguments.choices = choices.address
    arguments.node_log_probs = log_probs.address if log_probs else None
    return KernelLaunch("accept", (count, 1, 1), FEW_THREADS, _cut((length, 4)), arguments)


def _sampled_accept(contract: GraphSpec, threads: int) -> GraphKernels | None:
    """None if the graph reads what the kernels do not, such as a newer option of sampling."""
    fields = (*DrawArguments._fields_, *AcceptArguments._fields_)
    # The kernels follow the parents, so they need no table of ancestors.
    if not {tensor.name for tensor in contract.inputs} <= {"ancestors", *(field[0] for field in fields)}:
        return None
    (length,) = _fixed_shapes(contract)["path"]
    (vocab_size,) = {t.shape[2] for t in contract.inputs if t.name == "logits"}
    assert isinstance(vocab_size, int)
    blocks = -(-vocab_size // VOCABULARY_BLOCK)
    shared_bytes = max(
        threads * THRESHOLDS * 4,
        threads * 8,
        _cut((threads, 4), (blocks, 4), (VOCABULARY_BLOCK, 4), (1, 4), (1, 4)),
    )

    def launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
        arguments = DrawArguments()
        shape = arrays["input_ids"].shape
        choices, log_probs = scratch("choices", shape, "int64"), scratch("log_probs", shape, "float32")
        own = {"choices": choices, "log_probs": log_probs}
        _fill(arguments, {**arrays, **own}, num_nodes=shape[1], num_places=length, vocab_size=vocab_size)
        draw = KernelLaunch("draw", (shape[1], shape[0], 1), threads, shared_bytes, arguments)
        return [draw, _accept_launch(arrays, choices, log_probs, length)]

    return GraphKernels(shared_bytes, launches)


def _commit(contract: GraphSpec) -> GraphKernels | None:
    """None if the layers' caches differ in their shape, or there are too many of them."""
    caches = [tensor for tensor in contract.inputs if tensor.name.startswith("past_")]
    (length,) = _fixed_shapes(contract)["path"]
    kinds = {(tensor.shape, tensor.dtype) for tensor in caches}
    if len(kinds) != 1 or len(caches) > MAX_CACHES:
        return None
    ((shape, dtype),) = kinds
    (features,) = {t for t in contract.inputs if t.name == "features"}
    row_bytes = int(shape[3]) * ITEM_SIZES[dtype]
    feature_bytes = int(features.shape[2]) * ITEM_SIZES[features.dtype]
    shared_bytes = _cut((length * row_bytes, 1))

    def launches(arrays: Arrays, scratch: Scratch) -> list[KernelLaunch]:
        arguments = CommitArguments()
        count, num_heads, capacity, _ = arrays[caches[0].name].shape
        _fill(
            arguments,
            arrays,
            num_places=length,
            num_nodes=arrays["features"].shape[1],
            num_heads=num_heads,
            capacity=capacity,
            row_bytes=row_bytes,
            feature_bytes=feature_bytes,
            num_caches=len(caches),
        )
        for index, cache in enumerate(caches):
            arguments.caches[index] = arrays[cache.name].address
        grid = (num_heads, len(caches) + 1, count)
        return [KernelLaunch("commit", grid, FEW_THREADS, shared_bytes, arguments)]

    return GraphKernels(shared_bytes, launches)


class KernelEngine:
    """A ``DeviceEngine`` that launches kernels in place of a graph."""

    def __init__(self, device: Device, launcher: Launcher, kernels: GraphKernels):
        self._device = device
        self._launcher = launcher
        self._kernels = kernels
        # Memory of its own, which all passes share, since they run one after another.
        self._scratch: dict[str, DeviceArray] = {}

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        launches = self._kernels.launches(arrays, self._memory)

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

    threads: as of ``graph_kernels``
    """

    def made(name: str) -> DeviceEngine:
        kernels = graph_kernels(name, manifest.graphs[name], manifest.drafter, threads=threads)
        if kernels is None or kernels.shared_bytes > launcher.max_shared_bytes:
            return make(name)
        return KernelEngine(device, launcher, kernels)

    return made

"""Every engine of a bundle against the same graph of the reference, on the same inputs.

The reference decodes; each of its first passes in new shapes is repeated by the device's engine, and
compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.gpu.decoders import most_context
from export.verify.comparison import TOLERANCES, compare
from export.verify.runner import DevicePasses, decoded, encoded
from runtime.core.bundle import DRAFT, PLAIN, Bundle, GraphSpec, TensorSpec
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, GreedyAcceptor
from runtime.decode.batch import Batch
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import SequenceFactory
from runtime.decoder import SpeculativeDecoder
from runtime.device import plan as step_plan
from runtime.device.device import CPU, Device, DeviceArray, DeviceEngine, HostDevice, MakeEngine
from runtime.device.ort import OrtGraph
from runtime.device.step import GraphStep
from runtime.engines.ort import SUFFIX
from runtime.load.device import load_graph_step, open_device
from runtime.profiler.runs import TIE_TOLERANCE
from runtime.text import PromptTokenizer

# Passes that are compared of a graph in the same shapes.
PASSES = 4


@dataclass
class Found:
    """The comparison of one graph: passes and their shapes, the largest difference, and problems."""

    passes: int = 0
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)


class ComparedEngine:
    """The reference's engine, with a pass of the device's after each of its first passes in new shapes."""

    def __init__(
        self,
        graph: str,
        host: Device,
        engine: DeviceEngine,
        passes: DevicePasses,
        found: Found,
        tolerance: float,
    ):
        self._graph, self._host, self._engine, self._passes = graph, host, engine, passes
        self._found, self._tolerance = found, tolerance
        self._counts: dict[tuple[Any, ...], int] = {}

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        return partial(self._pass, dict(arrays), self._engine.bind(arrays))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        self._pass(arrays, partial(self._engine.run, arrays))

    def _pass(self, arrays: Mapping[str, DeviceArray], launch: Callable[[], None]) -> None:
        contract = self._passes.contract
        key = tuple(arrays[tensor.name].shape for tensor in contract.inputs)
        if self._counts.get(key, 0) >= PASSES:
            launch()
            return
        self._counts[key] = self._counts.get(key, 0) + 1
        inputs = {}
        for tensor in contract.inputs:
            values = self._read(arrays[tensor.name])
            rounded = decoded(encoded(values, tensor.dtype), tensor.dtype).astype(values.dtype)
            # Both sides get the same values, also where the device's type is the narrower one.
            self._host.upload(rounded, arrays[tensor.name])
            inputs[tensor.name] = rounded
        launch()
        expected = {tensor.name: self._read(arrays[tensor.name]) for tensor in contract.outputs}
        outputs = self._passes(inputs, {name: values.shape for name, values in expected.items()})
        worst, problems = compare(self._graph, inputs, outputs, expected, self._tolerance)
        found = self._found
        found.passes += 1
        found.shapes.add(key)
        found.worst = max(found.worst, worst)
        found.problems += [problem for problem in problems if problem not in found.problems]

    def _read(self, array: DeviceArray) -> NDArray[Any]:
        values = np.empty(array.shape, array.dtype)
        self._host.download(array, values)
        return values


# Passes of different shapes round differently. Half precision has steps of 1/64 (float16) and 1/8 (bfloat16)
# between 16 and 32, where large logits are; two tokens within four steps are a tie.
TIES = {"float32": TIE_TOLERANCE, "float16": 4 / 64, "bfloat16": 4 / 8}


def activations(bundle: Bundle) -> str:
    """The type in which the target model computes, which is that of its caches."""
    inputs = bundle.manifest.graphs["backbone"].inputs
    return next(tensor.dtype for tensor in inputs if tensor.name.startswith("past_"))


def tie_tolerance(bundle: Bundle) -> float:
    return TIES[activations(bundle)]


class _KeepLogits(GreedyAcceptor):
    """Keeps what the target model said of the last token of a prompt."""

    needs_logits = True

    def __init__(self) -> None:
        self.logits: NDArray[np.float32] | None = None

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        self.logits = None if logits is None else logits[0].copy()
        return super().accept(tree, next_tokens, logits)


def logit_gap(decoder: SpeculativeDecoder, prefix: Sequence[int], tokens: Sequence[int]) -> float:
    """How far the worst of these tokens is below the best logit after ``prefix``."""
    logits = logits_after(decoder, prefix).astype(np.float64)
    return float(logits.max() - logits[list(tokens)].min())


def logits_after(decoder: SpeculativeDecoder, prefix: Sequence[int]) -> NDArray[np.float32]:
    """The target model's logits [V] after ``prefix``."""
    sequence = decoder.new_sequence(prefix, max_new_tokens=1, stop_token_ids=())
    acceptor = _KeepLogits()
    sequence.acceptor = acceptor
    decoder.batch.clear()
    decoder.batch.enter(sequence)
    assert acceptor.logits is not None
    return acceptor.logits


# Steps of every size with each accept graph.
STEPS = 2
# A reference on a CPU is slow, so it reads no more of a prompt.
PROMPT_TOKENS = 128
SEQUENCES = 2
SAMPLINGS = (GREEDY, SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=1))
# Of weights that are quantised, two bundles with different weights have different results.
EXACT_WEIGHTS = ("fp32", "fp16", "bf16")


def check_reference(bundle: Bundle, reference: Bundle) -> None:
    """Raises UserError for a reference that cannot be one of this bundle."""
    ours, theirs = bundle.manifest, reference.manifest
    where = f"--reference: {reference.path}"
    if theirs.engine_plan is not None:
        raise UserError(f"--reference: must be a bundle for ONNX Runtime, got {theirs.target}")
    if theirs.model.vocab_size != ours.model.vocab_size:
        raise UserError(f"{where} holds another model, its vocabulary differs")
    if activations(reference) == "bfloat16":
        raise UserError(
            f"{where} computes in bfloat16, which ONNX Runtime cannot on a CPU; export it in fp32"
        )
    if not theirs.step_nodes:
        raise UserError(f"{where} has no graphs of steps; export it with --step-nodes")
    if ours.precision != theirs.precision and not {ours.precision, theirs.precision} <= set(EXACT_WEIGHTS):
        raise UserError(
            f"{where} has weights in {theirs.precision}, the bundle in {ours.precision}; export it with "
            "the same --precision"
        )
    for name in ours.graphs.keys() & theirs.graphs.keys():
        if _shapes(ours.graphs[name]) != _shapes(theirs.graphs[name]):
            raise UserError(f"{where} holds another model or head, the tensors of {name} differ")


def _shapes(contract: GraphSpec) -> dict[str, tuple[int | str, ...]]:
    """The shapes of a graph's tensors, but for the capacities of caches, which a target may fix."""

    def shape(tensor: TensorSpec) -> tuple[int | str, ...]:
        if "past_" in tensor.name or "present_" in tensor.name:
            return (*tensor.shape[:2], *tensor.shape[3:])
        return () if tensor.name in ("attn_mask", "positions") else tensor.shape

    return {tensor.name: shape(tensor) for tensor in (*contract.inputs, *contract.outputs)}


def check_engines(
    bundle: Bundle, reference: Bundle, device: str, prompts: Sequence[Sequence[int]], num_threads: int | None
) -> dict[str, Found]:
    """Compare all graphs that both bundles have, by graph; the others have no passes.

    Where the graphs of both can read a part of their caches, passes with caches of two sizes are compared.
    Raises DeviceError where the device cannot load or run an engine.
    """
    found = {name: Found() for name in bundle.manifest.graphs}
    opened, make = open_device(bundle, device, num_threads)
    try:
        tolerance = TOLERANCES[activations(bundle)]

        def compared(name: str, host: Device, engine: DeviceEngine) -> DeviceEngine:
            contract = bundle.manifest.graphs[name]
            passes = DevicePasses(opened, make(name), contract)
            return ComparedEngine(name, host, engine, passes, found[name], tolerance)

        for max_length in _max_lengths(bundle, reference):
            with _reference_runner(bundle, reference, compared, max_length, num_threads) as runner:
                _decode(bundle, reference, runner, prompts, max_length)
    finally:
        opened.close()
    return found


def _max_lengths(bundle: Bundle, reference: Bundle) -> Iterator[int]:
    """Tokens that the caches have room for: as many as the texts get and, where that can be, many more."""
    ours, theirs = bundle.manifest, reference.manifest
    most = most_context(bundle)
    # New tokens of all steps, so that no sequence ends before the last of them.
    frames = theirs.drafter.num_frames if theirs.drafter else 0
    yield min(most, PROMPT_TOKENS + (1 + frames) * STEPS * len(_sizes(bundle, reference)) + 1)
    longer = 2 * step_plan.SHORTEST_READ
    if longer <= most and all(step_plan.reads_parts(each.graphs["backbone"]) for each in (ours, theirs)):
        yield longer


def _sizes(bundle: Bundle, reference: Bundle) -> tuple[int, ...]:
    """The trees that steps of both bundles have."""
    sizes = reference.manifest.step_nodes
    return tuple(size for size in sizes if size in bundle.manifest.step_nodes)


@contextmanager
def _reference_runner(
    bundle: Bundle,
    reference: Bundle,
    compared: Callable[[str, Device, DeviceEngine], DeviceEngine],
    max_length: int,
    num_threads: int | None,
) -> Iterator[GraphStep]:
    """The reference's runner, in the shapes that the bundle's engines take."""
    ours, theirs = bundle.manifest, reference.manifest
    plan = ours.engine_plan
    sizes = _sizes(bundle, reference)
    has_head = sizes[-1] > 0 and ours.drafter is not None and theirs.drafter is not None
    # The reference's capacities are open where those of the engines are fixed.
    graphs = {
        name: _with_caches_of(ours.graphs[name], contract) if plan and name in ours.graphs else contract
        for name, contract in theirs.graphs.items()
    }

    # ONNX Runtime runs the files of a bundle for PyTorch too. It rounds no activations to int8, because the
    # engines that are compared do not.
    def open_compared(given: Bundle, _: str | None, threads: int | None) -> tuple[Device, MakeEngine]:
        host = HostDevice()

        def make(name: str) -> DeviceEngine:
            path, contract = given.path / f"{name}{SUFFIX}", given.manifest.graphs[name]
            return compared(name, host, OrtGraph(path, contract, int8_products=False, num_threads=threads))

        return host, make

    manifest = replace(theirs, graphs=graphs, engine_plan=plan, step_nodes=sizes)
    runner = load_graph_step(
        Bundle(reference.path, manifest),
        DRAFT if has_head else PLAIN,
        device=CPU,
        max_num_seqs=min(SEQUENCES, plan.max_num_seqs if plan else SEQUENCES),
        max_length=max_length,
        num_threads=num_threads,
        opener=open_compared,
    )
    try:
        yield runner
    finally:
        runner.close()


def _with_caches_of(engine: GraphSpec, contract: GraphSpec) -> GraphSpec:
    """A contract with the caches' capacities of an engine."""
    shapes = {tensor.name: tensor.shape for tensor in (*engine.inputs, *engine.outputs)}

    def fixed(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(tensor, shape=shapes[tensor.name])
            if tensor.name.startswith(("past_", "present_"))
            else tensor
            for tensor in tensors
        )

    return GraphSpec(fixed(contract.inputs), fixed(contract.outputs))


def _decode(
    bundle: Bundle,
    reference: Bundle,
    runner: GraphStep,
    prompts: Sequence[Sequence[int]],
    max_length: int,
) -> None:
    """Steps of all sizes that both bundles have, greedy ones and such that draw their tokens."""
    sizes = _sizes(bundle, reference)
    factory = SequenceFactory(
        PromptTokenizer(reference),
        vocab_size=reference.manifest.model.vocab_size,
        max_length=max_length,
        eos_token_ids=(),
    )
    batch = Batch(runner)
    count = runner.max_num_seqs
    turns = [(sampling, size) for sampling in SAMPLINGS for size in sizes for _ in range(STEPS)]
    last = None
    for sampling, size in tqdm(turns, desc="engines", unit="step", leave=False):
        if sampling is not last or len(batch.sequences) < count:
            batch.clear()
            for index in range(count):
                ids = list(prompts[index % len(prompts)])[: min(PROMPT_TOKENS, max_length // 2)]
                batch.enter(factory.make(ids, max_new_tokens=max_length - len(ids), sampling=sampling))
            last = sampling
        batch.step(FixedBudget(size))

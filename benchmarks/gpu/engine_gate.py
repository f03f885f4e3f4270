"""Every engine of a bundle against the same graph of the reference, on the same inputs.

The reference decodes a few steps on the CPU, through the runner of graphs. The inputs of its passes are
copied, and a pass of the device's engine on these inputs has to find what the reference finds. So every
engine gets inputs as decoding makes them, and none gets what another one on the device got wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace
from tqdm import tqdm

from benchmarks.gpu.compared_engine import ComparedEngine, Found
from benchmarks.gpu.logit_gap import activations
from export.verify.comparison import TOLERANCES
from export.verify.device_passes import DevicePasses
from runtime.core.bundle import DRAFT, PLAIN, Bundle, GraphSpec, TensorSpec
from runtime.core.errors import UserError
from runtime.decode.batch import Batch
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import SequenceFactory
from runtime.device import plan as step_plan
from runtime.device.device import CPU, Device, DeviceEngine, MakeEngine
from runtime.device.step import GraphStep
from runtime.load.device import load_graph_step, open_device
from runtime.text import PromptTokenizer

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
    most = ours.engine_plan.max_context if ours.engine_plan else ours.model.max_position_embeddings
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
    # ONNX Runtime runs the files of a bundle for PyTorch too.
    theirs = replace(theirs, target="onnxruntime")

    def open_compared(given: Bundle, device: str | None, threads: int | None) -> tuple[Device, MakeEngine]:
        host, make = open_device(given, device, threads)
        return host, lambda name: compared(name, host, make(name))

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

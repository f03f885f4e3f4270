"""The capacity, shapes and memory for which engines are compiled."""

import math
from collections.abc import Iterable

from transformers import PretrainedConfig

from drafters.config import DrafterConfig
from export.errors import ExportError
from export.heads import EXPORTS
from export.options import FUSED, Options
from runtime.core import bundle
from runtime.core.bundle import CAPACITY_MULTIPLE, STREAMING, EnginePlan, EngineProfile, GraphSpec, ModelSpec
from runtime.core.options import PROMPT_SIZES
from runtime.device.device import ITEM_SIZES

# Tokens of a prompt that one pass reads.
PREFILL_CHUNK = 512
# Draft nodes of a step: for one sequence, which leaves most of a GPU idle, and for many.
NODES_ALONE, NODES_TOGETHER = 64, 16
MAX_NODES = 512
MAX_BATCH = 256
# Tokens that a step adds to the context of a head, for which engines are tuned.
USUAL_CONTEXT = 8
# Step-logic graphs that work on the positions of the head's cache.
OF_THE_HEAD = ("prepare", "expand")
GIB = 2**30
# Types of caches for which the compiler has kernels of attention.
HALF = ("float16", "bfloat16")


def draft_plan(model: ModelSpec, options: Options) -> EnginePlan:
    """The plan by the user's options, before anything is compiled. Raises ExportError naming the flag."""
    batch = options.max_batch
    nodes = options.max_nodes
    if nodes is None:
        nodes = NODES_ALONE if batch == 1 else NODES_TOGETHER
    for flag, value, most in (("--max-batch", batch, MAX_BATCH), ("--max-nodes", nodes, MAX_NODES)):
        if not 1 <= value <= most:
            raise ExportError(f"{flag}: must be between 1 and {most}, got {value}")
    if options.gpu_memory is not None and not options.gpu_memory > 0:  # not a number fails too
        raise ExportError(f"--gpu-memory: must be above 0, got {options.gpu_memory:g}")
    return EnginePlan(
        max_context=model.max_position_embeddings,
        max_num_seqs=batch,
        max_nodes=nodes,
        prefill_chunk=min(PREFILL_CHUNK, model.max_position_embeddings),
    )


def read_bounds(capacity: int) -> tuple[int, int, int]:
    """Positions of a cache that passes read: those in use, up to all."""
    return CAPACITY_MULTIPLE, capacity, capacity


def target_model_reads_in_place(config: PretrainedConfig, activations: str, attention: str | None) -> bool:
    """Whether passes of a target model read its whole caches in place.

    Otherwise they copy the keys and values that they read, so they should read a part (``slice_caches``).
    TensorRT's kernels read in place where several query heads share keys. Attention with a soft cap on its
    scores is made of other operators.

    activations: the type of the caches
    attention: a form of ``export.options.ATTENTION``, or None for the target's default
    """
    num_heads = config.num_attention_heads
    has_groups = (getattr(config, "num_key_value_heads", None) or num_heads) < num_heads
    softcap = getattr(config, "attn_logit_softcapping", None)
    return has_groups and softcap is None and _has_kernels(activations, attention)


def drafter_reads_in_place(config: DrafterConfig, activations: str, attention: str | None) -> bool:
    """The same for passes of a draft head."""
    return config.num_kv_heads < config.num_heads and _has_kernels(activations, attention)


def _has_kernels(activations: str, attention: str | None) -> bool:
    return activations in HALF and attention in (None, FUSED)


def step_profiles(
    plan: EnginePlan, config: DrafterConfig | None, options: Options, contract: GraphSpec, name: str
) -> tuple[EngineProfile, ...]:
    """The shapes of a step-logic graph.

    They allow two sequences at least: TensorRT for RTX 1.7 cannot build a search for exactly one.

    name: the graph's
    """
    step, batch = plan.max_nodes + 1, max(plan.max_num_seqs, 2)
    bounds = {"B": (1, batch, batch), "N": (1, step, step), "W": (1, options.beam_width, options.beam_width)}
    if config and name in OF_THE_HEAD:
        bounds["R"] = read_bounds(drafter_capacity(plan, config, options))
    else:
        bounds["R"] = read_bounds(backbone_capacity(plan, config))
    if config:
        # A path to a node that is expanded, with the root.
        longest = max(config.num_frames - 1, 1)
        bounds["L"] = (1, longest, longest)
    return _of_contract([bounds], contract)


def backbone_capacity(plan: EnginePlan, config: DrafterConfig | None) -> int:
    """Positions of a slot of the target model: the context, then a tree, the longest path or padding."""
    longest_path = config.num_frames + 1 if config else 1
    behind = max(plan.max_nodes, min(plan.prefill_chunk, PROMPT_SIZES[0]))
    return bundle.target_model_capacity(plan.max_context, behind, longest_path)


def drafter_capacity(plan: EnginePlan, config: DrafterConfig, options: Options) -> int:
    """Positions of a slot of the draft head, or of the pass with its streams."""
    if options.family_of(config).name == STREAMING:
        return bundle.streaming_capacity(plan.max_context, plan.max_nodes, config.num_frames)
    return bundle.drafter_capacity(
        plan.max_context,
        padding=max(plan.max_nodes, config.num_frames, min(plan.prefill_chunk, PROMPT_SIZES[0])) + 1,
        family=config.family,
        num_frames=config.num_frames,
        beam_width=options.beam_width,
    )


def backbone_profiles(
    plan: EnginePlan, config: DrafterConfig | None, contract: GraphSpec
) -> tuple[EngineProfile, ...]:
    """One for the steps of all sequences, and one for the prompt of a single sequence.

    Both contain passes of one token: a profile for one size alone would store the weights a second time. So
    would one for exactly one sequence where weights are quantised: the demo's engine in int8 has 40.1 MiB
    with it and 31.3 MiB with one or two.
    """
    return _of_contract(_target_model_passes(plan, config), contract)


def _target_model_passes(plan: EnginePlan, config: DrafterConfig | None) -> list[EngineProfile]:
    step, chunk, batch = plan.max_nodes + 1, plan.prefill_chunk, plan.max_num_seqs
    read = read_bounds(backbone_capacity(plan, config))
    if batch == 1:
        longest = max(step, chunk)
        return [{"B": (1, 1, 1), "N": (1, step, longest), "M": (1, step, step), "R": read}]
    return [
        {"B": (1, batch, batch), "N": (1, step, step), "M": (1, step, step), "R": read},
        {"B": (1, 1, 2), "N": (1, chunk, chunk), "M": (1, 1, step), "R": read},
    ]


def _of_contract(profiles: Iterable[EngineProfile], contract: GraphSpec) -> tuple[EngineProfile, ...]:
    """Profiles with the axes that a graph's inputs have."""
    axes = {size for tensor in contract.inputs for size in tensor.shape}
    return tuple({axis: each[axis] for axis in each if axis in axes} for each in profiles)


def drafter_profiles(
    plan: EnginePlan, config: DrafterConfig, options: Options, contract: GraphSpec
) -> tuple[EngineProfile, ...]:
    """As for the target model: one for the steps of all sequences, one for the context of a single one."""
    axes_of = EXPORTS[options.family_of(config).name].axes
    if axes_of is None:
        # A prompt keeps all its tokens; one of them is scored and starts streams.
        passes = _target_model_passes(plan, config)
        return _of_contract([{**each, "E": each["M"], "K": each["N"]} for each in passes], contract)
    names = {size for tensor in contract.inputs for size in tensor.shape if isinstance(size, str)}
    axes = axes_of(config, options, names)
    step, chunk, batch = plan.max_nodes + 1, plan.prefill_chunk, plan.max_num_seqs
    if batch == 1:
        longest = max(step, chunk, config.num_frames + 1)
        context = (axes.min_context, min(USUAL_CONTEXT, longest), longest)
        found = [{"B": (1, 1, 1), "A": context, **axes.step}]
    else:
        # A step on a device reads as many new tokens as the longest path has, whatever was accepted.
        most = max(step, config.num_frames + 1)
        context = (axes.min_context, min(USUAL_CONTEXT, most), most)
        found = [
            {"B": (1, batch, batch), "A": context, **axes.step},
            {"B": (1, 1, 2), "A": (axes.min_context, chunk, chunk), **axes.prompt},
        ]
    read = read_bounds(drafter_capacity(plan, config, options))
    return _of_contract([{**each, "R": read} for each in found], contract)


def cache_bytes(contract: GraphSpec, num_seqs: int) -> int:
    """Bytes of the keys and values of all sequences."""
    caches = [tensor for tensor in contract.inputs if tensor.name.startswith("past_")]
    sizes = (math.prod(map(int, cache.shape[1:])) * ITEM_SIZES[cache.dtype] for cache in caches)
    return num_seqs * sum(sizes)


def check_memory(memory: dict[str, dict[str, int]], limit_gib: float | None) -> None:
    """Raises ExportError if all parts together need more than the GPU's memory."""
    total = sum(sum(parts.values()) for parts in memory.values())
    if limit_gib is not None and total > limit_gib * GIB:
        caches = sum(parts.get("cache", 0) for parts in memory.values())
        raise ExportError(
            f"--gpu-memory: the engines need {total / GIB:.2f} GiB, {caches / GIB:.2f} GiB of it for caches, "
            f"got {limit_gib:g} GiB; smaller --max-context, --max-batch or --max-nodes make caches smaller"
        )


def describe(plan: EnginePlan) -> str:
    """The plan in a few lines of text."""
    lines = [
        f"context {plan.max_context}, {plan.max_num_seqs} sequences, {plan.max_nodes} draft nodes, "
        f"prompts in chunks of {plan.prefill_chunk}"
    ]
    for name, parts in plan.memory.items():
        sizes = ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in parts.items())
        lines.append(f"{name}: {sizes}")
    return "\n".join(lines)

"""The tensors of every graph with weights, by name, shape and dtype. No other module spells them out.

Axes: B sequences, N tokens of a step, M positions with logits, S capacity of the cache, A context tokens
that are new to the draft head, T frames. A parallel drafter with attention fills as many frames as it is
asked for, from the first on; without attention it fills all its frames, so T is a constant there. The axes
of autoregressive drafters are described in ``drafters.autoregressive``.

A pass with speculative streams reads N nodes of a tree, or N tokens of a prompt. It has early-exit logits for
E of them, K go on to the upper layers, and M of these have logits and a lattice.
"""

from drafters.autoregressive import AutoregressiveDrafter
from drafters.config import DrafterConfig
from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec

INT, BOOL, FLOAT = "int64", "bool", "float32"
# What every pass of a target model reads, with streams or without.
TOKENS = (
    TensorSpec("input_ids", ("B", "N"), INT),
    TensorSpec("position_ids", ("B", "N"), INT),
    TensorSpec("attn_mask", ("B", 1, "N", "S"), BOOL),
    TensorSpec("write_index", ("B",), INT),
)


def target_model_contract(model: ModelSpec) -> GraphSpec:
    """The inputs and outputs of the target model's graph, in order."""
    past, present = _cache(model)
    return GraphSpec(
        inputs=(
            *TOKENS,
            TensorSpec("logit_indices", ("B", "M"), INT),
            *past,
        ),
        outputs=(
            TensorSpec("logits", ("B", "M", model.vocab_size), FLOAT),
            TensorSpec("next_tokens", ("B", "M"), INT),
            TensorSpec("features", ("B", "N", model.feature_size), FLOAT),
            *present,
        ),
    )


def parallel_contract(config: DrafterConfig, spec: DrafterSpec) -> GraphSpec:
    """The inputs and outputs of a parallel drafter; without attention it has no mask and no cache."""
    past, present = _cache(spec)
    frames = "T" if config.num_layers and spec.num_frames > 1 else spec.num_frames
    inputs = [
        TensorSpec("features", ("B", "A", config.feature_size), FLOAT),
        TensorSpec("context_position_ids", ("B", "A"), INT),
    ]
    if config.reads_anchor:
        inputs.append(TensorSpec("anchor_ids", ("B", 1), INT))
    inputs.append(TensorSpec("frame_position_ids", ("B", frames), INT))
    if config.num_layers:
        inputs.append(TensorSpec("attn_mask", ("B", 1, frames, "S"), BOOL))
        inputs.append(TensorSpec("write_index", ("B",), INT))
    outputs = _lattice(config, spec, ("B",), frames)
    return GraphSpec(inputs=(*inputs, *past), outputs=(*outputs, *present))


def autoregressive_contract(drafter: AutoregressiveDrafter, spec: DrafterSpec) -> GraphSpec:
    """The inputs and outputs of an autoregressive drafter; the drafter itself declares what it reads."""
    past, present = _cache(spec)
    inputs = [
        TensorSpec(name, shape, str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in drafter.tensors.items()
    ]
    if past:
        inputs.append(TensorSpec("write_index", ("B",), INT))
    states = 1 if drafter.heads_per_depth else "P"
    outputs = (
        TensorSpec("child_tokens", ("B", "M", spec.top_k), INT),
        TensorSpec("child_logprobs", ("B", "M", spec.top_k), FLOAT),
        TensorSpec("new_states", ("B", states, drafter.config.hidden_size), FLOAT),
    )
    return GraphSpec(inputs=(*inputs, *past), outputs=(*outputs, *present))


def streaming_contract(model: ModelSpec, config: DrafterConfig, spec: DrafterSpec) -> GraphSpec:
    """The inputs and outputs of a pass that verifies a tree and drafts the next one by streams.

    kept_places are the numbers below K, which is how many nodes are kept; parents has -1 for the root, and 0
    for every token of a prompt, which keeps all its tokens; stream_indices are places among the kept nodes.
    """
    past, present = _cache(model)
    return GraphSpec(
        inputs=(
            *TOKENS,
            TensorSpec("parents", ("B", "N"), INT),
            TensorSpec("scored_indices", ("B", "E"), INT),
            TensorSpec("kept_places", ("K",), INT),
            TensorSpec("stream_indices", ("B", "M"), INT),
            *past,
        ),
        outputs=(
            TensorSpec("kept_nodes", ("B", "K"), INT),
            TensorSpec("logits", ("B", "M", model.vocab_size), FLOAT),
            TensorSpec("next_tokens", ("B", "M"), INT),
            *_lattice(config, spec, ("B", "M"), spec.num_frames),
            *present,
        ),
    )


def _lattice(
    config: DrafterConfig, spec: DrafterSpec, anchors: tuple[int | str, ...], frames: int | str
) -> list[TensorSpec]:
    """What ``drafters.lattice`` computes of the frames after each anchor."""
    top_k = spec.top_k
    outputs = [
        TensorSpec("frame_tokens", (*anchors, frames, top_k), INT),
        TensorSpec("frame_logprobs", (*anchors, frames, top_k), FLOAT),
    ]
    if config.has_blank:
        outputs.append(TensorSpec("blank_logprobs", (*anchors, frames), FLOAT))
    if config.transition != "none":
        size, followers = config.transition_size, top_k + int(config.has_blank)
        if config.transition == "mlp":
            outputs.append(TensorSpec("transition_frames", (*anchors, frames, size), FLOAT))
        outputs.append(TensorSpec("transition_anchor", (*anchors, size), FLOAT))
        outputs.append(TensorSpec("transition_previous", (*anchors, frames, top_k, size), FLOAT))
        outputs.append(TensorSpec("transition_following", (*anchors, frames, followers, size), FLOAT))
    return outputs


def _cache(spec: ModelSpec | DrafterSpec) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The keys and values of every layer, before a pass and after it."""
    past, present = (
        [
            TensorSpec(f"{prefix}_{kind}_{layer}", ("B", spec.num_kv_heads, "S", spec.head_dim), FLOAT)
            for layer in range(spec.num_layers)
            for kind in ("key", "value")
        ]
        for prefix in ("past", "present")
    )
    return past, present

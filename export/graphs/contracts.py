"""The tensors of every graph by name, shape and dtype. No other module of the exporter spells them out.

Axes: B sequences, N tokens of a step, M positions with logits, S capacity of the cache, A context tokens
that are new to the draft head, T frames. A parallel drafter with attention fills as many frames as it is
asked for, from the first on; without attention it fills all its frames, so T is a constant there. The axes
of autoregressive drafters are described in ``drafters.autoregressive``.
"""

from drafters.autoregressive import AutoregressiveDrafter
from drafters.config import DrafterConfig
from runtime.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec

INT, BOOL, FLOAT = "int64", "bool", "float32"


def target_model_contract(model: ModelSpec) -> GraphSpec:
    """The inputs and outputs of the target model's graph, in order."""
    past, present = _cache(model)
    return GraphSpec(
        inputs=(
            TensorSpec("input_ids", ("B", "N"), INT),
            TensorSpec("position_ids", ("B", "N"), INT),
            TensorSpec("attn_mask", ("B", 1, "N", "S"), BOOL),
            TensorSpec("write_index", ("B",), INT),
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
    top_k = spec.top_k
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
    outputs = [
        TensorSpec("frame_tokens", ("B", frames, top_k), INT),
        TensorSpec("frame_logprobs", ("B", frames, top_k), FLOAT),
    ]
    if config.has_blank:
        outputs.append(TensorSpec("blank_logprobs", ("B", frames), FLOAT))
    if config.transition != "none":
        size, followers = config.transition_size, top_k + int(config.has_blank)
        if config.transition == "mlp":
            outputs.append(TensorSpec("transition_frames", ("B", frames, size), FLOAT))
        outputs.append(TensorSpec("transition_anchor", ("B", size), FLOAT))
        outputs.append(TensorSpec("transition_previous", ("B", frames, top_k, size), FLOAT))
        outputs.append(TensorSpec("transition_following", ("B", frames, followers, size), FLOAT))
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

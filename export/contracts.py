"""The tensors of both graphs, by name, shape and dtype: the one place that spells them out.

Axes: B sequences, N tokens of a step, M rows with logits, S cache capacity, A context tokens that
are new to the draft head, T frames: the first of them, as many as are wanted, or all of a head without
attention. K labels a frame are a constant of a head.
"""

from drafters.autoregressive import AutoregressiveDrafter
from drafters.config import DrafterConfig
from runtime.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec

INT, BOOL, FLOAT = "int64", "bool", "float32"


def target_model_contract(model: ModelSpec) -> GraphSpec:
    """The backbone graph's inputs and outputs in order."""
    past, present = _cache(model.num_layers, model.num_kv_heads, model.head_dim)
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
    """A frame head's inputs and outputs in order; a head without attention has no mask and no cache."""
    past, present = _cache(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    # Frames that attend can be left out from the end; others have matrices of their own.
    frames = "T" if config.num_layers and spec.num_frames > 1 else spec.num_frames
    width = spec.top_k
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
        TensorSpec("frame_tokens", ("B", frames, width), INT),
        TensorSpec("frame_logprobs", ("B", frames, width), FLOAT),
    ]
    if config.has_blank:
        outputs.append(TensorSpec("blank_logprobs", ("B", frames), FLOAT))
    if config.transition != "none":
        size, followers = config.transition_size, width + int(config.has_blank)
        if config.transition == "mlp":
            outputs.append(TensorSpec("transition_frames", ("B", frames, size), FLOAT))
        outputs.append(TensorSpec("transition_anchor", ("B", size), FLOAT))
        outputs.append(TensorSpec("transition_previous", ("B", frames, width, size), FLOAT))
        outputs.append(TensorSpec("transition_following", ("B", frames, followers, size), FLOAT))
    return GraphSpec(inputs=(*inputs, *past), outputs=(*outputs, *present))


def autoregressive_contract(drafter: AutoregressiveDrafter, spec: DrafterSpec) -> GraphSpec:
    """An autoregressive head's inputs and outputs in order; its axes are in ``drafters.autoregressive``."""
    past, present = _cache(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    inputs = [
        TensorSpec(name, shape, str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in drafter.tensors.items()
    ]
    if past:
        inputs.append(TensorSpec("write_index", ("B",), INT))
    outputs = (
        TensorSpec("child_tokens", ("B", "M", spec.top_k), INT),
        TensorSpec("child_logprobs", ("B", "M", spec.top_k), FLOAT),
        TensorSpec("new_states", ("B", "P", drafter.config.hidden_size), FLOAT),
    )
    return GraphSpec(inputs=(*inputs, *past), outputs=(*outputs, *present))


def _cache(
    num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    def specs(prefix: str) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(f"{prefix}_{kind}_{layer}", ("B", num_kv_heads, "S", head_dim), FLOAT)
            for layer in range(num_layers)
            for kind in ("key", "value")
        )

    return specs("past"), specs("present")

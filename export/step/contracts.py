"""The tensors of the step's weightless graphs, by name and shape.

Axes: B sequences, N nodes of a tree with its root, S capacity of a cache. P is fixed: the nodes of the
longest path with the root, which is also how many tokens of context a step adds to a head at most.
"""

from collections.abc import Iterable

from runtime.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec

INT, BOOL, FLOAT = "int64", "bool", "float32"
# Inputs of a parallel head that follow from the lengths alone.
PREPARED = ("context_position_ids", "frame_position_ids", "attn_mask", "write_index")
ANCHOR = TensorSpec("anchor_ids", ("B", 1), INT)
LENGTHS = TensorSpec("lengths", ("B",), INT)
COUNTS = TensorSpec("counts", ("B",), INT)


def path_length(drafter: DrafterSpec | None) -> int:
    """P: the root and one node for each frame, or level."""
    return 1 + (drafter.num_frames if drafter else 0)


def prepare_contract(drafter: GraphSpec, spec: DrafterSpec) -> GraphSpec:
    """What a parallel head reads beside features and anchors, from the lengths of the contexts.

    lengths: positions of the context; counts: how many of them are new to the head
    positions: 0, 1, ... up to the capacity of the head's cache
    """
    made = [tensor for tensor in drafter.inputs if tensor.name in PREPARED]
    has_cache = any(tensor.name == "write_index" for tensor in made)
    positions = [TensorSpec("positions", ("S",), INT)] if has_cache else []
    return GraphSpec(
        (LENGTHS, COUNTS, *positions), tuple(_sized(made, A=path_length(spec), T=spec.num_frames))
    )


def search_contract(drafter: GraphSpec | None, spec: DrafterSpec | None, num_nodes: int) -> GraphSpec:
    """From a lattice to what the target model reads; without nodes, the root alone.

    positions: 0, 1, ... up to the capacity of the target model's cache
    """
    lattice = []
    if drafter and spec and num_nodes:
        made = [tensor for tensor in drafter.outputs if not tensor.name.startswith("present_")]
        lattice = _sized(made, T=spec.num_frames)
    size = num_nodes + 1
    return GraphSpec(
        (*lattice, ANCHOR, LENGTHS, TensorSpec("positions", ("S",), INT)),
        (
            TensorSpec("input_ids", ("B", size), INT),
            TensorSpec("position_ids", ("B", size), INT),
            TensorSpec("attn_mask", ("B", 1, size, "S"), BOOL),
            TensorSpec("parents", ("B", size), INT),
            TensorSpec("depths", ("B", size), INT),
            TensorSpec("ancestors", ("B", size, size), BOOL),
            TensorSpec("node_log_probs", ("B", size), FLOAT),
        ),
    )


def accept_contract(model: ModelSpec, length: int, *, sampled: bool) -> GraphSpec:
    """From what the target model says of a tree to the path that is accepted, and the new tokens."""
    choice: tuple[TensorSpec, ...] = (TensorSpec("next_tokens", ("B", "N"), INT),)
    if sampled:
        choice = (
            TensorSpec("logits", ("B", "N", model.vocab_size), FLOAT),
            TensorSpec("depths", ("B", "N"), INT),
            TensorSpec("uniforms", ("B", length), FLOAT),
            TensorSpec("temperature", ("B",), FLOAT),
            TensorSpec("top_k", ("B",), INT),
            TensorSpec("top_p", ("B",), FLOAT),
            TensorSpec("min_p", ("B",), FLOAT),
        )
    outputs = [
        TensorSpec("path", ("B", length), INT),
        TensorSpec("new_counts", ("B",), INT),
        TensorSpec("new_tokens", ("B", length), INT),
        TensorSpec("new_anchor_ids", ("B", 1), INT),
        TensorSpec("new_lengths", ("B",), INT),
    ]
    if sampled:
        outputs.append(TensorSpec("new_log_probs", ("B", length), FLOAT))
    tree = (
        TensorSpec("input_ids", ("B", "N"), INT),
        TensorSpec("parents", ("B", "N"), INT),
        TensorSpec("ancestors", ("B", "N", "N"), BOOL),
    )
    return GraphSpec((*tree, *choice, LENGTHS), tuple(outputs))


def commit_contract(target_model: GraphSpec, model: ModelSpec, length: int) -> GraphSpec:
    """Packs the accepted rows of the target model's caches, and picks the path's features for the head."""
    return GraphSpec(
        (
            TensorSpec("path", ("B", length), INT),
            LENGTHS,
            TensorSpec("features", ("B", "N", model.feature_size), FLOAT),
            *(tensor for tensor in target_model.inputs if tensor.name.startswith("past_")),
        ),
        (
            TensorSpec("path_features", ("B", length, model.feature_size), FLOAT),
            *(tensor for tensor in target_model.outputs if tensor.name.startswith("present_")),
        ),
    )


def _sized(tensors: Iterable[TensorSpec], **axes: int) -> list[TensorSpec]:
    """Tensors whose open axes of these names have a fixed size."""

    def size(axis: int | str) -> int | str:
        return axes.get(axis, axis) if isinstance(axis, str) else axis

    return [TensorSpec(t.name, tuple(size(axis) for axis in t.shape), t.dtype) for t in tensors]

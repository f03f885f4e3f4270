"""The tensors of the step-logic graphs, by name and shape.

Axes: B sequences, N nodes of a tree with its root, S capacity of a cache. P is fixed: the nodes of the
longest path with the root, which is also how many tokens of context a step adds to a head at most.

Of an autoregressive head, K is how many children it returns of a node (``top_k``), M how many nodes of a
level it expands (``beam_width``) and D to which depth it drafts; these are fixed. W is open: the nodes of one
pass, which are the root alone or M.
"""

from collections.abc import Iterable

from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec
from runtime.core.options import SAMPLING_FILTERS

INT, BOOL, FLOAT = "int64", "bool", "float32"
# Inputs of a head that follow from the lengths alone.
PREPARED = ("query_indices", "context_position_ids", "frame_position_ids", "attn_mask", "write_index")
ANCHOR = TensorSpec("anchor_ids", ("B", 1), INT)
LENGTHS = TensorSpec("lengths", ("B",), INT)
COUNTS = TensorSpec("counts", ("B",), INT)


def path_length(drafter: DrafterSpec | None) -> int:
    """P: the root and one node for each frame, or level."""
    return 1 + (drafter.num_frames if drafter else 0)


def prepare_contract(drafter: GraphSpec, spec: DrafterSpec) -> GraphSpec:
    """The positions, mask and write index that a head reads, from the lengths of the contexts.

    Of an autoregressive head it is the root's pass. The outputs are in the order of the head's inputs.
    lengths: positions of the context; counts: how many of them are new to the head
    positions: 0, 1, ... up to the capacity of the head's cache
    """
    made = [tensor for tensor in drafter.inputs if tensor.name in PREPARED]
    names = {tensor.name for tensor in made}
    inputs = [COUNTS]
    # A head that reads the last feature alone asks for nothing else.
    if names != {"query_indices"}:
        inputs.insert(0, LENGTHS)
    if "write_index" in names:
        inputs.append(TensorSpec("positions", ("S",), INT))
    outputs = _sized(made, A=path_length(spec), T=spec.num_frames, Q=1, P=1)
    return GraphSpec(tuple(inputs), tuple(outputs))


def num_levels(spec: DrafterSpec, num_nodes: int) -> int:
    """Levels below the root that a tree of so many drafts can have; each costs a pass of the head."""
    return min(num_nodes, spec.num_frames)


def expand_contract(drafter: GraphSpec, spec: DrafterSpec) -> GraphSpec:
    """From the children of one pass to the frontier, the nodes of the next, and what the head reads of them.

    frontier_scores: log-probabilities of the paths to the W nodes of the pass
    next_scores: those of the M best children; ``chosen``: which of the W*K children they are
    paths: Hydra's inputs ``path_ids_*``, of any length; ``next_paths`` are longer by one
    node_features, parent_features: EAGLE's states of the nodes of the pass, and of the frontier's parents
    reach: EAGLE, [B, W, M*(D-1)], 1 for a node and its ancestors among the places behind the context
    depth: EAGLE, of the frontier, which is at least 1
    """
    width, children = spec.beam_width, spec.top_k
    inputs = [
        TensorSpec("child_tokens", ("B", "W", children), INT),
        TensorSpec("child_logprobs", ("B", "W", children), FLOAT),
        TensorSpec("frontier_scores", ("B", "W"), FLOAT),
    ]
    outputs = [TensorSpec("next_scores", ("B", width), FLOAT), TensorSpec("chosen", ("B", width), INT)]
    if spec.heads_per_depth:
        inputs.append(TensorSpec("paths", ("B", "W", "L"), INT))
        outputs.append(TensorSpec("next_paths", ("B", width, "L1"), INT))
        return GraphSpec(tuple(inputs), tuple(outputs))
    (size,) = {tensor.shape[-1] for tensor in drafter.outputs if tensor.name == "new_states"}
    places = width * (spec.num_frames - 1)
    inputs += [
        TensorSpec("node_features", ("B", "W", size), FLOAT),
        TensorSpec("reach", ("B", "W", places), INT),
        TensorSpec("depth", (1,), INT),
        LENGTHS,
        TensorSpec("positions", ("S",), INT),
    ]
    outputs += [
        TensorSpec("parent_features", ("B", width, size), FLOAT),
        TensorSpec("token_ids", ("B", width), INT),
        TensorSpec("position_ids", ("B", width), INT),
        TensorSpec("attn_mask", ("B", 1, width, "S"), BOOL),
        TensorSpec("write_index", ("B",), INT),
        TensorSpec("next_reach", ("B", width, places), INT),
    ]
    return GraphSpec(tuple(inputs), tuple(outputs))


def lattice_inputs(drafter: GraphSpec, spec: DrafterSpec) -> list[TensorSpec]:
    """What a search over frames reads: the lattice of a parallel head."""
    made = [tensor for tensor in drafter.outputs if not tensor.name.startswith("present_")]
    return _sized(made, T=spec.num_frames)


def level_inputs(spec: DrafterSpec, num_nodes: int) -> list[TensorSpec]:
    """What a search over levels reads: the children that every pass found, level by level.

    For every level but the root's, the inputs say which nodes the pass was of, too.
    """
    width, children = spec.beam_width, spec.top_k
    tensors = []
    for depth in range(num_levels(spec, num_nodes)):
        nodes = width if depth else 1
        tensors.append(TensorSpec(f"child_tokens_{depth}", ("B", nodes, children), INT))
        tensors.append(TensorSpec(f"child_logprobs_{depth}", ("B", nodes, children), FLOAT))
        if depth:
            tensors.append(TensorSpec(f"frontier_scores_{depth}", ("B", nodes), FLOAT))
            tensors.append(TensorSpec(f"chosen_{depth}", ("B", nodes), INT))
    return tensors


def search_contract(drafts: Iterable[TensorSpec], num_nodes: int) -> GraphSpec:
    """From the drafts of a head to the inputs of the target model; without nodes, the root alone.

    drafts: ``lattice_inputs``, ``level_inputs`` or, without nodes, nothing
    positions: 0, 1, ... up to the capacity of the target model's cache
    """
    size = num_nodes + 1
    return GraphSpec(
        (*drafts, ANCHOR, LENGTHS, TensorSpec("positions", ("S",), INT)),
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
    """From the target model's outputs for a tree to the accepted path and the new tokens."""
    choice: tuple[TensorSpec, ...] = (TensorSpec("next_tokens", ("B", "N"), INT),)
    if sampled:
        choice = (
            TensorSpec("logits", ("B", "N", model.vocab_size), FLOAT),
            TensorSpec("depths", ("B", "N"), INT),
            TensorSpec("uniforms", ("B", length), FLOAT),
            *(TensorSpec(name, ("B",), INT if name == "top_k" else FLOAT) for name in SAMPLING_FILTERS),
        )
    outputs = [
        TensorSpec("path", ("B", length), INT),
        TensorSpec("new_counts", ("B",), INT),
        TensorSpec("new_tokens", ("B", length), INT),
    ]
    if sampled:
        outputs.append(TensorSpec("new_log_probs", ("B", length), FLOAT))
    tree = (
        TensorSpec("input_ids", ("B", "N"), INT),
        TensorSpec("parents", ("B", "N"), INT),
        TensorSpec("ancestors", ("B", "N", "N"), BOOL),
    )
    return GraphSpec((*tree, *choice), tuple(outputs))


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

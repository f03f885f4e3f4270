"""From a bundle's files to the parts of a decoder. A new engine target is chosen here, once."""

from runtime.bundle import AUTOREGRESSIVE, PARALLEL, Bundle, GraphSpec
from runtime.decoding.target_model import USUAL_NODES, TargetModel
from runtime.engines.base import Engine
from runtime.engines.kv_cache import KVCache
from runtime.engines.ort import OrtEngine
from runtime.errors import BundleError, RequestError
from runtime.proposers.autoregressive import AutoregressiveProposer
from runtime.proposers.base import MAX_SHARED_CONTEXT, NoProposer, ParallelProposer, Proposer, Transform
from runtime.trees.baselines.medusa_tree import medusa_transform
from runtime.trees.baselines.paper_transform import paper_transform
from runtime.trees.prefix_search import prefix_search, uncollapsed_search

# With the bundle's draft head, or plainly.
METHODS = ("draft", "vanilla")
TRANSFORMS: dict[str, Transform] = {
    "prefix": prefix_search,
    "paper": paper_transform,
    "uncollapsed": uncollapsed_search,
    "medusa": medusa_transform,
}
DEFAULT_TRANSFORM = "prefix"
# Frames beyond one a draft. Tokens per step at 8 drafts, by benchmarks.methods with other values here,
# against all 12 frames: none -2.8%, one -1.3%, two -0.4%.
SPARE_FRAMES = 2


def load_target_model(
    bundle: Bundle,
    *,
    max_nodes: int,
    features: bool = True,
    num_rows: int = 1,
    max_capacity: int | None = None,
    num_threads: int | None = None,
) -> TargetModel:
    """The backbone engine; every row has room for the whole context and one tree.

    features: whether to bring them to the host beside the next tokens, for a draft head
    num_rows: sequences at a time
    """
    model = bundle.manifest.model
    outputs = {"next_tokens", *(["features"] if features else [])}
    context = max_capacity or model.max_position_embeddings
    kv = KVCache(
        num_layers=model.num_layers,
        batch_size=num_rows,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_capacity=context + max(max_nodes + 1, USUAL_NODES),
    )
    return TargetModel(_engine(bundle, "backbone", kv, frozenset(outputs), num_threads))


def load_drafter(
    bundle: Bundle,
    method: str,
    *,
    transform: str = DEFAULT_TRANSFORM,
    num_rows: int = 1,
    num_threads: int | None = None,
) -> Proposer:
    """The draft head for ``num_rows`` sequences, or none for ``vanilla``.

    Raises RequestError for an unknown method.
    """
    if method not in METHODS:
        raise RequestError(f"method: must be one of {', '.join(METHODS)}, got {method!r}")
    if transform not in TRANSFORMS:
        raise RequestError(f"transform: must be one of {', '.join(TRANSFORMS)}, got {transform!r}")
    if method == "vanilla":
        return NoProposer()
    spec = bundle.manifest.drafter
    if spec is None:
        raise RequestError(f"method: {bundle.path} holds no draft head, so it can only decode with 'vanilla'")
    if spec.family not in (PARALLEL, AUTOREGRESSIVE):
        raise BundleError(f"family: this runtime knows {PARALLEL} and {AUTOREGRESSIVE}, got {spec.family!r}")
    sequential = spec.family == AUTOREGRESSIVE
    if sequential and transform != DEFAULT_TRANSFORM:
        raise RequestError(
            f"transform: {bundle.path} holds a {spec.drafter_type} head, which grows its tree itself; "
            f"{transform!r} is for heads that fill frames"
        )
    # Cache rows beyond the context: drafts of a tree; frames, and the padding before them.
    levels, frames = spec.beam_width * (spec.num_frames - 1), spec.num_frames + MAX_SHARED_CONTEXT
    kv = KVCache(
        num_layers=spec.num_layers,
        batch_size=num_rows,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_capacity=bundle.manifest.model.max_position_embeddings + (levels if sequential else frames),
    )
    engine = _engine(bundle, "drafter", kv, _own_outputs(bundle.manifest.graphs["drafter"]), num_threads)
    if sequential:
        return AutoregressiveProposer(
            engine,
            max_depth=spec.num_frames,
            beam_width=spec.beam_width,
            min_level_probability=spec.min_level_probability,
            heads_per_depth=spec.heads_per_depth,
            has_cache=spec.num_layers > 0,
            num_rows=num_rows,
        )
    graph = bundle.manifest.graphs["drafter"]
    return ParallelProposer(
        engine,
        num_frames=spec.num_frames,
        transform=TRANSFORMS[transform],
        merges_repeats=spec.merges_repeats,
        spare_frames=_spare_frames(graph) if transform == DEFAULT_TRANSFORM else None,
        num_rows=num_rows,
    )


def _spare_frames(graph: GraphSpec) -> int | None:
    """How many frames the search needs beyond one a draft; None where the graph always fills all of them."""
    if not any("T" in tensor.shape for tensor in graph.inputs):
        return None
    has_blank = any(tensor.name == "blank_logprobs" for tensor in graph.outputs)
    return SPARE_FRAMES if has_blank else 0


def _own_outputs(graph: GraphSpec) -> frozenset[str]:
    """All outputs but the cache."""
    return frozenset(t.name for t in graph.outputs if not t.name.startswith("present_"))


def _engine(
    bundle: Bundle, name: str, kv: KVCache, outputs: frozenset[str], num_threads: int | None
) -> Engine:
    if bundle.manifest.target != "onnxruntime":
        raise BundleError(f"target: this runtime runs 'onnxruntime', got {bundle.manifest.target!r}")
    spec: GraphSpec = bundle.manifest.graphs[name]
    slab = kv.slab.shape
    cached = [tensor.shape for tensor in spec.inputs if tensor.name.startswith("past_")]
    if len(cached) != slab[0] or any((shape[1], shape[3]) != (slab[2], slab[4]) for shape in cached):
        raise BundleError(f"bundle.json: the {name}'s layers, heads and sizes contradict its graph's tensors")
    return OrtEngine(bundle.path / f"{name}.onnx", spec, kv, outputs=outputs, num_threads=num_threads)

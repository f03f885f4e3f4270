"""From a bundle's files to a runner whose steps run on the host, and to its parts."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from runtime.core.bundle import (
    AUTOREGRESSIVE,
    MAX_NUM_NODES,
    PARALLEL,
    PLAIN,
    STREAMING,
    Bundle,
    DrafterSpec,
    GraphSpec,
    ModelSpec,
    drafter_capacity,
    streaming_capacity,
    target_model_capacity,
)
from runtime.core.errors import BundleError, RequestError
from runtime.core.lattice import Search
from runtime.core.options import choose_method
from runtime.core.prefix_search import chain_search, prefix_search
from runtime.decode.proposers.autoregressive import AutoregressiveProposer
from runtime.decode.proposers.base import NoProposer, Proposer
from runtime.decode.proposers.parallel import MAX_SHARED_CONTEXT, ParallelProposer
from runtime.decode.step import HostStep
from runtime.decode.streams import StreamProposer, StreamTargetModel
from runtime.decode.target_model import USUAL_NODES, TargetModel, keeps_bits
from runtime.engines.ort import has_compiled_form
from runtime.engines.protocol import Engine
from runtime.load.engines import check_files, host_engine

LOGGER = logging.getLogger(__name__)
SomeTargetModel = TypeVar("SomeTargetModel", bound=TargetModel)
# Frames that a head with blanks fills beyond one for each node. Tokens per step at 8 nodes, by
# benchmarks.methods with other values here, against all 12 frames: none -2.8 %, one -1.3 %, two -0.4 %.
SPARE_FRAMES = 2
# The least rows of a pass, and what they are a multiple of, in the order in which they are tried.
ROW_RULES = ((1, 1), (2, 1), (1, 2))


def load_target_model(
    bundle: Bundle,
    *,
    max_nodes: int,
    features: bool = True,
    max_num_seqs: int = 1,
    max_length: int | None = None,
    num_threads: int | None = None,
) -> TargetModel:
    """The target model's engine; every slot has room for ``max_length`` positions and one tree.

    features: whether to bring them to the host beside the next tokens, for a draft head
    """
    model = bundle.manifest.model
    longest = max_length or model.max_position_embeddings
    capacity = target_model_capacity(longest, max_nodes, USUAL_NODES)
    return _with_equal_bits(
        bundle,
        "backbone",
        TargetModel,
        longest,
        capacity=capacity,
        max_num_seqs=max_num_seqs,
        outputs=frozenset({"next_tokens", "features"} if features else {"next_tokens"}),
        num_threads=num_threads,
    )


def _with_equal_bits(
    bundle: Bundle,
    graph: str,
    make_model: Callable[[Engine], SomeTargetModel],
    max_length: int,
    *,
    max_num_seqs: int,
    **settings: Any,
) -> SomeTargetModel:
    """The target model, tested for equal bits if its graph promises them.

    settings: of the graph's engine, but for the form of its products
    A product of one row alone may take another kernel (int4 on a processor with AVX2 alone), and so may the
    last row of an odd number (int4 with blocks of more than 32 rows): then a pass computes two rows at least,
    or an even number of rows. If the bits still differ, products are in float32, where a difference is so
    small that it changes a text only at a tie.
    """
    manifest = bundle.manifest
    int8_products = manifest.int8_products
    make_engine = _engine_maker(bundle, graph, manifest.model)

    def make(int8_products: bool, compiled: bool) -> SomeTargetModel:
        forms = {"int8_products": int8_products, "compiled": compiled}
        return make_model(make_engine(max_num_seqs=max_num_seqs, **settings, **forms))

    if not manifest.row_invariant:
        return make(False, False)
    sizes = {
        "vocab_size": manifest.model.vocab_size,
        "max_length": max_length,
        "max_num_seqs": max_num_seqs,
    }
    forms = [True, False] if has_compiled_form(bundle, graph) else [False]
    for compiled in forms:
        target_model = make(int8_products, compiled)
        block, engine = target_model.engine.key_block, target_model.engine
        if block is None:
            continue
        for engine.min_rows, engine.row_multiple in ROW_RULES:
            if keeps_bits(target_model, block=block, **sizes):
                target_model.key_block = block
                return target_model
        engine.min_rows, engine.row_multiple = ROW_RULES[0]
        if compiled:
            LOGGER.warning("%s: compiled operators are wrong on this machine, and are not used", bundle.path)
    LOGGER.warning(
        "%s: passes of different shapes differ in the last bits on this machine; products are in float32",
        bundle.path,
    )
    return make(False, False) if int8_products else target_model


def load_host_step(
    bundle: Bundle,
    method: str,
    *,
    search: Search = prefix_search,
    kept_nodes: int | None = None,
    max_num_seqs: int = 1,
    max_length: int,
    num_threads: int | None = None,
    target_model: TargetModel | None = None,
) -> HostStep:
    """The steps on the host of a bundle whose method is ``draft`` or ``plain``.

    kept_nodes: of speculative streams; None for what the bundle was exported with
    target_model: takes the place of the bundle's own
    """
    spec = bundle.manifest.drafter
    proposer: Proposer
    if method != PLAIN and spec and spec.drafts_in_verify_pass:
        if target_model is not None:
            raise RequestError("speculative streams run in a target model of their own", field="target_model")
        target_model = _stream_target_model(
            bundle, spec, kept_nodes or spec.kept_nodes, max_num_seqs, max_length, num_threads
        )
        proposer = StreamProposer(
            search=search, merges_repeats=spec.merges_repeats, max_num_seqs=max_num_seqs
        )
        return HostStep(target_model, proposer, max_num_seqs=max_num_seqs)
    proposer = load_proposer(
        bundle, method, search=search, max_num_seqs=max_num_seqs, num_threads=num_threads
    )
    target_model = target_model or load_target_model(
        bundle,
        max_nodes=MAX_NUM_NODES,
        features=method != PLAIN,
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        num_threads=num_threads,
    )
    return HostStep(target_model, proposer, max_num_seqs=max_num_seqs)


def load_proposer(
    bundle: Bundle,
    method: str,
    *,
    search: Search = prefix_search,
    max_num_seqs: int = 1,
    num_threads: int | None = None,
) -> Proposer:
    """The bundle's draft head, or none for ``plain``.

    Raises RequestError for a method that the bundle does not have, and for a search that the head cannot
    have.
    """
    spec = bundle.manifest.drafter
    if choose_method(bundle.manifest, method, bundle.path) == PLAIN or spec is None:
        return NoProposer()
    if spec.family not in PROPOSERS:
        *others, last = PROPOSERS
        raise BundleError(f"family: this runtime knows {', '.join(others)} and {last}, got {spec.family!r}")
    return PROPOSERS[spec.family](bundle, spec, search, max_num_seqs, num_threads)


def _stream_target_model(
    bundle: Bundle,
    spec: DrafterSpec,
    kept_nodes: int | None,
    max_num_seqs: int,
    max_length: int,
    num_threads: int | None,
) -> StreamTargetModel:
    names = (tensor.name for tensor in bundle.manifest.graphs[STREAMING].outputs)
    # The test compares all nodes of a tree, so they are pruned only after it.
    target_model = _with_equal_bits(
        bundle,
        STREAMING,
        partial(StreamTargetModel, num_frames=spec.num_frames),
        max_length,
        capacity=streaming_capacity(max_length, MAX_NUM_NODES, spec.num_frames),
        max_num_seqs=max_num_seqs,
        outputs=frozenset(name for name in names if name != "logits" and not name.startswith("present_")),
        num_threads=num_threads,
    )
    target_model.kept_nodes = kept_nodes
    return target_model


def _parallel(
    bundle: Bundle, spec: DrafterSpec, search: Search, max_num_seqs: int, num_threads: int | None
) -> ParallelProposer:
    graph = bundle.manifest.graphs["drafter"]
    return ParallelProposer(
        _drafter_engine(bundle, spec, MAX_SHARED_CONTEXT, max_num_seqs, num_threads),
        num_frames=spec.num_frames,
        search=search,
        merges_repeats=spec.merges_repeats,
        spare_frames=_spare_frames(graph) if search is prefix_search else None,
        max_num_seqs=max_num_seqs,
    )


def _autoregressive(
    bundle: Bundle, spec: DrafterSpec, search: Search, max_num_seqs: int, num_threads: int | None
) -> AutoregressiveProposer:
    if search not in (prefix_search, chain_search):
        raise RequestError(
            f"{bundle.path} holds a {spec.drafter_type} head, which expands its tree itself; other searches "
            "are for parallel heads",
            field="search",
        )
    is_chain = search is chain_search
    return AutoregressiveProposer(
        _drafter_engine(bundle, spec, 0, max_num_seqs, num_threads),
        max_depth=spec.num_frames,
        beam_width=1 if is_chain else spec.beam_width,
        num_children=1 if is_chain else None,
        min_level_probability=spec.min_level_probability,
        heads_per_depth=spec.heads_per_depth,
        max_num_seqs=max_num_seqs,
    )


def _streaming(
    bundle: Bundle, spec: DrafterSpec, search: Search, max_num_seqs: int, num_threads: int | None
) -> Proposer:
    """Refuses: the proposer of ``load_host_step`` takes the drafts that the pass left behind."""
    raise RequestError(f"the streams of {bundle.path} draft in the target model's own pass", field="method")


# By ``DrafterSpec.family``: what makes the proposer that drafts beside a target model.
PROPOSERS: dict[str, Callable[..., Proposer]] = {
    PARALLEL: _parallel,
    AUTOREGRESSIVE: _autoregressive,
    STREAMING: _streaming,
}


def _spare_frames(graph: GraphSpec) -> int | None:
    """How many frames the search needs beyond one for each node; None where the graph always fills all."""
    if not any("T" in tensor.shape for tensor in graph.inputs):
        return None
    has_blank = any(tensor.name == "blank_logprobs" for tensor in graph.outputs)
    return SPARE_FRAMES if has_blank else 0


def _drafter_engine(
    bundle: Bundle, spec: DrafterSpec, padding: int, max_num_seqs: int, num_threads: int | None
) -> Engine:
    """padding: of the context that sequences share a pass for, as of ``drafter_capacity``"""
    capacity = drafter_capacity(
        bundle.manifest.model.max_position_embeddings,
        padding=padding,
        family=spec.family,
        num_frames=spec.num_frames,
        beam_width=spec.beam_width,
    )
    outputs = (tensor.name for tensor in bundle.manifest.graphs["drafter"].outputs)
    host_outputs = frozenset(name for name in outputs if not name.startswith("present_"))
    return _engine_maker(bundle, "drafter", spec)(
        capacity=capacity,
        max_num_seqs=max_num_seqs,
        outputs=host_outputs,
        num_threads=num_threads,
        int8_products=True,
        compiled=has_compiled_form(bundle, "drafter"),
    )


def _engine_maker(bundle: Bundle, name: str, sizes: ModelSpec | DrafterSpec) -> Callable[..., Engine]:
    """What makes the engine of a graph, given the other arguments of ``MakeHostEngine``.

    Raises BundleError for a target that this runtime does not run on the host, for a graph without a file,
    and for one of other sizes.
    """
    make = host_engine(bundle)
    check_files(bundle, [name])
    cached = [t.shape for t in bundle.manifest.graphs[name].inputs if t.name.startswith("past_")]
    expected = (sizes.num_kv_heads, sizes.head_dim)
    if len(cached) != 2 * sizes.num_layers or any((shape[1], shape[3]) != expected for shape in cached):
        raise BundleError(f"bundle.json: the {name}'s layers, heads and sizes contradict its graph's tensors")
    return partial(make, bundle, name, sizes)

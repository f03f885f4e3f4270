"""The draft graph of TensorRT Edge-LLM's method DFlash, for our heads with attention.

Edge-LLM keeps keys and values in pages, and has two operators of its own for them: one writes the keys and
values of context tokens, the other attends and writes those of the block. Its decoder hands over the hidden
states of the tokens that were accepted, and a block for every sequence: the anchor token and mask tokens,
embedded. Draft t of a sequence is the argmax of row t of its block, so that a block of T tokens has T - 1
drafts. (Read in ``models/dflash`` of the wheel of 0.11.0, and in the kernel that prepares verification.)

Each token of the block is a frame of the head here, so T is the head's ``num_frames``. The search for the
chain is a part of the graph, and logits say which tokens it has drafted. Sizes, besides those of the head:

    P   physical tokens: R * T
    A   delta tokens: context that is new to the head; some are padding, of sequence -1
"""

from dataclasses import replace

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.attention import AttentionFrames
from drafters.config import DrafterConfig
from drafters.lattice import LatticeTensors, chain_search, lattice_tensors
from drafters.layers import DraftLayer
from export.graphs.trace import name_axes, trace_standard
from runtime.core.bundle import GraphSpec, TensorSpec

UPDATE, ATTENTION = PLUGINS = ("trt_edgellm::DFlashTargetKVCacheUpdate", "trt_edgellm::AttentionPlugin")
# What attention reads besides projections and pages.
ATTENTION_INPUTS = (
    "query_lengths",
    "rope_rotary_cos_sin",
    "past_lengths",
    "kv_page_table",
    "packed_attention_mask",
    "attention_position_ids",
    "query_start_offsets",
    "attention_sequence_lengths",
    "execution_phase_marker",
    "context_sequence_count_carrier",
)
# Settings of the attention that are off.
UNUSED = (
    "enable_fp8_kv_cache",
    "enable_context_mask_selector",
    "enable_vision_block_attention",
    "enable_qk_norm",
    "qk_norm_post_rope",
    "enable_kv_shared",
    "enable_attention_sink",
    "enable_contiguous_query_swa",
)
# Tokens whose keys and values lie on a page.
PAGE_SIZE = 128
WORD_BITS = 32
# The logit of tokens that are not drafted, beside 0: the probability of the draft is 1 in float32.
NOT_DRAFTED = -1e4
# The logarithm of a probability of 0.
IMPOSSIBLE = -1e4
P, R, A = "physical_tokens", "num_sequences", "delta_tokens"
# Sizes of a trace, as of ``export.graphs.trace.EXAMPLE_AXES``.
EXAMPLE_AXES = {
    P: 8,
    R: 2,
    "num_sequences + 1": 3,
    A: 6,
    "num_pages": 5,
    "max_pages_per_seq": 4,
    "execution_phase_extent": 7,
    "packed_mask_width": 9,
}


def draft_contract(config: DrafterConfig) -> GraphSpec:
    """The tensors that the decoder binds."""

    def half(name: str, *shape: str | int) -> TensorSpec:
        return TensorSpec(name, shape, "float16")

    def exact(name: str, *shape: str | int) -> TensorSpec:
        return TensorSpec(name, shape, "float32")

    def ids(name: str, *shape: str | int) -> TensorSpec:
        return TensorSpec(name, shape, "int32")

    pool = (2, "num_pages", PAGE_SIZE, config.num_kv_heads, config.head_dim)
    past, present = (
        [half(f"{prefix}_key_values_{layer}", *pool) for layer in range(config.num_layers)]
        for prefix in ("past", "present")
    )
    inputs = (
        half("inputs_embeds", P, config.hidden_size),
        half("dflash_target_hidden_concat", A, config.feature_size),
        exact("rope_rotary_cos_sin", P, config.head_dim),
        ids("positions", P),
        ids("query_start_offsets", "num_sequences + 1"),
        ids("query_lengths", R),
        ids("past_lengths", R),
        ids("attention_sequence_lengths", R),
        ids("state_indices", R),
        ids("execution_phase_marker", "execution_phase_extent"),
        ids("context_sequence_count_carrier", 0),
        ids("kv_page_table", R, 2, "max_pages_per_seq"),
        exact("dflash_delta_rope_cos_sin", A, config.head_dim),
        ids("dflash_delta_positions", A),
        ids("dflash_delta_token_to_sequence", A),
        ids("attention_position_ids", P),
        ids("packed_attention_mask", P, "packed_mask_width"),
    )
    return GraphSpec((*inputs, *past), (exact("logits", P, config.vocab_size), *present))


def update_pages(key: Tensor, value: Tensor, pool: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Edge-LLM's operator that rotates keys and writes them and values, each [A, KH, D], to their pages."""
    names = ("rope_cos_sin", "positions", "token_to_sequence")
    delta = [inputs[f"dflash_delta_{name}"] for name in names]
    operands = (key, value, pool, *delta, inputs["kv_page_table"])
    updated: Tensor = torch.onnx.ops.symbolic(UPDATE, operands, dtype=pool.dtype, shape=pool.shape, version=1)
    return updated


def attend_pages(
    qkv: Tensor, pool: Tensor, inputs: dict[str, Tensor], config: DrafterConfig
) -> tuple[Tensor, Tensor]:
    """Edge-LLM's operator that rotates queries and keys, writes to the pages, and attends.

    qkv: [P, (QH + 2 * KH) * D] -> [P, QH, D], and the pool with the keys and values of the block
    """
    attended, updated = torch.onnx.ops.symbolic_multi_out(
        ATTENTION,
        (qkv, pool, *(inputs[name] for name in ATTENTION_INPUTS)),
        {
            "num_q_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_dim,
            "attention_scale": config.head_dim**-0.5,
            "sliding_window_size": -1,
            "qkv_scales": [1.0, 1.0, 1.0],
            # Which tokens of a block see each other is what the mask says.
            "enable_tree_attention": 1,
            **dict.fromkeys(UNUSED, 0),
            "skip_softmax_scale_factor": 0.0,
            "rms_norm_eps": config.rms_norm_eps,
            "plugin_version": "1",
        },
        dtypes=(qkv.dtype, pool.dtype),
        shapes=((qkv.shape[0], config.num_heads, config.head_dim), pool.shape),
        version=1,
    )
    return attended, updated


class DFlashGraph(nn.Module):
    """One pass of a head for R sequences: the drafts of the block of each, as logits [P, V].

    head: with attention; it is tabulated, and cast
    top_k: labels of a frame that the search reads
    """

    def __init__(self, head: AttentionFrames, top_k: int, dtype: torch.dtype):
        super().__init__()
        head.tabulate()
        self.head = head.to(dtype)
        self.top_k = top_k

    def forward(self, inputs: dict[str, Tensor], pools: list[Tensor]) -> tuple[Tensor, ...]:
        head, frames = self.head, self.head.config.num_frames
        embedded = inputs["inputs_embeds"]
        offsets = inputs["query_start_offsets"].long()
        first = offsets[:-1]  # [R], the anchors' tokens
        token = torch.arange(embedded.shape[0])
        sequence = (token.unsqueeze(1) >= offsets[1:]).sum(1).clamp(max=first.shape[0] - 1)
        # Where [R * T] has the frame of every token.
        place = sequence * frames + (token - first.index_select(0, sequence)).clamp(max=frames - 1)

        inputs = inputs | {"packed_attention_mask": _whole_blocks(inputs, sequence)}
        context = head.context(inputs["dflash_target_hidden_concat"])
        anchors = F.embedding(first, embedded)
        hidden = F.embedding(place, self._starts(anchors, context, inputs).flatten(0, 1))  # [P, H]
        presents = []
        for layer, pool in zip(head.layers, pools, strict=True):
            assert isinstance(layer, DraftLayer)
            key, value = (
                project(context).unflatten(-1, (-1, layer.head_dim))
                for project in (layer.k_proj, layer.v_proj)
            )
            pool = update_pages(key, value, pool, inputs)
            normed = layer.input_norm(hidden)
            qkv = torch.cat([each(normed) for each in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
            attended, pool = attend_pages(qkv, pool, inputs, head.config)
            hidden = layer.finish(hidden, attended.flatten(1))
            presents.append(pool)

        frame = torch.arange(frames)
        rows = (first.unsqueeze(1) + frame).clamp(max=embedded.shape[0] - 1)
        is_asked = frame < inputs["query_lengths"].unsqueeze(1)
        lattice = self._lattice(F.embedding(rows, head.norm(hidden)), anchors, is_asked)
        chain, _ = chain_search(lattice, merges_repeats=head.config.merges_repeats, num_drafts=frames - 1)
        # Nobody reads the anchor's own row.
        drafts = torch.cat((chain[:, :1], chain), dim=1).flatten().index_select(0, place)
        is_draft = torch.arange(head.config.vocab_size) == drafts.unsqueeze(1)
        return torch.where(is_draft, 0.0, NOT_DRAFTED), *presents

    def _starts(self, anchors: Tensor, context: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """What frames begin as, [R, T, H]; anchors [R, H], context [A, H]."""
        sequences = torch.arange(anchors.shape[0]).unsqueeze(1)
        is_own = inputs["dflash_delta_token_to_sequence"] == sequences  # [R, A]
        # Every step brings at least the token that was the anchor before.
        newest = torch.where(is_own, inputs["dflash_delta_positions"], -1).argmax(-1)
        # The head sees this token of the context alone here, just before the anchor.
        before = torch.zeros_like(sequences)
        positions = before.unsqueeze(-1) + torch.arange(1, self.head.config.num_frames + 1)
        last = F.embedding(newest, context).unsqueeze(1)
        starts = self.head.starts(anchors.unsqueeze(1), last, before, positions)
        return starts.squeeze(1)

    def _lattice(self, hidden: Tensor, anchors: Tensor, is_asked: Tensor) -> LatticeTensors:
        """The lattice in float32 of frames [R, T, H].

        anchors: [R, H], embedded
        is_asked: [R, T]; a frame without a token in the block is certainly a blank
        """
        lattice = lattice_tensors(self.head, hidden, None, width=self.top_k)
        transition, blank = self.head.transition, lattice.blank_logprobs
        lattice = replace(
            lattice,
            frame_logprobs=lattice.frame_logprobs + torch.where(is_asked, 0.0, IMPOSSIBLE).unsqueeze(-1),
            blank_logprobs=None if blank is None else torch.where(is_asked, blank, 0.0),
            transition_anchor=None if transition is None else transition.of_embedded(anchors),
        )
        exact = {n: t.float() for n, t in lattice.present().items() if t.is_floating_point()}
        return replace(lattice, **exact)


def _whole_blocks(inputs: dict[str, Tensor], sequence: Tensor) -> Tensor:
    """A mask in which every token of a block sees all of them, in place of the decoder's [P, W] int32.

    The decoder can make a causal one, and nothing outside of it says when it does. Bit i of word w is
    token 32 w + i.

    sequence: [P], which one a token is of
    """
    words = torch.arange(inputs["packed_attention_mask"].shape[1])
    bits = inputs["query_lengths"].index_select(0, sequence).unsqueeze(1) - WORD_BITS * words
    first_bits = torch.tensor([2**count - 1 for count in range(WORD_BITS)] + [-1], dtype=torch.int32)
    return F.embedding(bits.clamp(0, WORD_BITS), first_bits.unsqueeze(1)).squeeze(-1)


def trace_draft(head: AttentionFrames, top_k: int) -> ir.Model:
    """The graph of a head, which is cast to float16, with the tensors of ``draft_contract``."""
    contract = draft_contract(head.config)
    module = DFlashGraph(head, top_k, torch.float16)
    model = trace_standard(module, contract, example_axes=EXAMPLE_AXES, plugins=PLUGINS)
    name_axes(model, contract)
    return model

"""What TensorRT Edge-LLM does around a graph: its steps, pages, and operators, written in numpy.

The operators are computed as the documentation of the exporter in the wheel of 0.11.0 says.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.graphs.dflash import NOT_DRAFTED, PAGE_SIZE
from tests.integrations.chains import is_drafted, runtime_chain

Array = NDArray[Any]
Arrays = dict[str, Array]


def rotated(heads: Array, cos_sin: Array) -> Array:
    """heads [T, H, D] rotated by cos_sin [T, D], cosines before sines."""
    cos, sin = np.split(cos_sin[:, None].astype(np.float32), 2, axis=-1)
    first, second = np.split(heads.astype(np.float32), 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def normed(heads: Array, weight: Array, eps: float) -> Array:
    """heads [T, H, D] by their root mean squares, times weight [D]."""
    values = heads.astype(np.float32)
    normalized: Array = values / np.sqrt(np.square(values).mean(-1, keepdims=True) + eps) * weight
    return normalized


def place(table: Array, sequence: int, position: int, kind: int) -> tuple[int, int, int]:
    """Where a pool [2, pages, PAGE_SIZE, H, D] has a position's keys (kind 0) or values (1)."""
    page = int(table[sequence, kind, position // PAGE_SIZE])
    return kind, page - kind * int(table[:, 1].min()), position % PAGE_SIZE


def write_pages(
    keys: Array,
    values: Array,
    pool: Array,
    cos_sin: Array,
    positions: Array,
    owners: Array,
    table: Array,
) -> Array:
    """Writes keys, which it rotates, and values of tokens to the positions of their sequences.

    A token of sequence -1 is padding.
    """
    pool = pool.copy()
    keys = rotated(keys.reshape(len(positions), *pool.shape[3:]), cos_sin)
    values = values.reshape(len(positions), *pool.shape[3:])
    for token, (position, owner) in enumerate(zip(positions, owners, strict=True)):
        if owner >= 0:
            pool[place(table, owner, position, 0)] = keys[token]
            pool[place(table, owner, position, 1)] = values[token]
    return pool


def attend(
    qkv: Array,
    pool: Array,
    lengths: Array,
    cos_sin: Array,
    past: Array,
    table: Array,
    packed_mask: Array,
    offsets: Array,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    norms: Sequence[Array] = (),
    eps: float = 0.0,
) -> tuple[Array, Array]:
    """Attention of tokens over the tokens before them and over those of their own pass that a mask names."""
    pool = pool.copy()
    heads = qkv.reshape(len(qkv), -1, head_size)
    queries, keys, values = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
    if norms:
        queries, keys = (
            normed(each, weight, eps) for each, weight in zip((queries, keys), norms, strict=True)
        )
    queries, keys = rotated(queries, cos_sin), rotated(keys, cos_sin)
    output = np.zeros((len(qkv), num_q_heads, head_size), qkv.dtype)
    for sequence, (count, before) in enumerate(zip(lengths, past, strict=True)):
        rows = slice(offsets[sequence], offsets[sequence] + count)
        for row in range(count):
            pool[place(table, sequence, before + row, 0)] = keys[rows][row]
            pool[place(table, sequence, before + row, 1)] = values[rows][row]
        seen_keys, seen_values = (
            np.stack([pool[place(table, sequence, each, kind)] for each in range(before + count)])
            .astype(np.float32)
            .repeat(num_q_heads // num_kv_heads, axis=1)
            for kind in (0, 1)
        )
        scores = np.einsum("qhd,khd->hqk", queries[rows], seen_keys) * scale
        bits = np.unpackbits(packed_mask[rows].view(np.uint8), axis=1, bitorder="little")[:, :count]
        allowed = np.concatenate((np.ones((count, before), bool), bits.astype(bool)), axis=1)
        scores = np.where(allowed, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        output[rows] = np.einsum("hqk,khd->qhd", weights, seen_values)
    return output, pool


class DFlashTargetKVCacheUpdate(OpRun):
    """``write_pages`` as an operator."""

    op_domain = "trt_edgellm"

    def _run(self, *inputs: Array) -> tuple[Array]:
        return (write_pages(*inputs),)


class AttentionPlugin(OpRun):
    """``attend`` as an operator."""

    op_domain = "trt_edgellm"

    def _run(
        self,
        qkv: Array,
        pool: Array,
        lengths: Array,
        cos_sin: Array,
        past: Array,
        table: Array,
        *inputs: Array,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        attention_scale: float,
        rms_norm_eps: float,
        enable_qk_norm: int,
        **_other: Any,
    ) -> tuple[Array, Array]:
        *norms, packed_mask, _, offsets = inputs[: 5 if enable_qk_norm else 3]
        return attend(
            *(qkv, pool, lengths, cos_sin, past, table, packed_mask, offsets),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=attention_scale,
            norms=norms,
            eps=rms_norm_eps,
        )


class Graph:
    """A graph with its pools of keys and values, as the engine calls it.

    compute: the graph's outputs for its inputs, by name
    dtypes: of its inputs, by name
    pool: KH and D
    """

    def __init__(
        self,
        compute: Callable[[Arrays], Arrays],
        dtypes: dict[str, Any],
        pool: tuple[int, int],
        num_sequences: int,
        max_length: int,
        rope_theta: float,
    ):
        self.compute, self.dtypes = compute, dtypes
        self.num_sequences, self.rope_theta, self.head_dim = num_sequences, rope_theta, pool[1]
        pages = -(-max_length // PAGE_SIZE)
        # Pages in reverse order, so that a page is found by the table alone.
        keys = np.arange(num_sequences * pages, dtype=np.int32)[::-1].reshape(num_sequences, pages)
        self.table = np.stack((keys, keys + num_sequences * pages), axis=1)
        shape = (2, num_sequences * pages, PAGE_SIZE, *pool)
        caches = [name for name in dtypes if name.startswith("past_key_values_")]
        self.caches: Arrays = {name: np.zeros(shape, dtypes[name]) for name in caches}

    @classmethod
    def load(cls, path: Path, num_sequences: int, max_length: int, rope_theta: float) -> Self:
        """The graph of a file, computed in numpy."""
        model = onnx.load(path)
        runner = ReferenceEvaluator(model, new_ops=[AttentionPlugin, DFlashTargetKVCacheUpdate])
        kinds = {value.name: value.type.tensor_type for value in model.graph.input}
        outputs = [value.name for value in model.graph.output]
        *_, num_heads, head_dim = (axis.dim_value for axis in kinds["past_key_values_0"].shape.dim)
        return cls(
            lambda inputs: dict(zip(outputs, runner.run(None, inputs), strict=True)),
            {name: onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) for name, kind in kinds.items()},
            (num_heads, head_dim),
            num_sequences,
            max_length,
            rope_theta,
        )

    def cos_sin(self, positions: Array) -> Array:
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None] * frequencies
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)

    def run(self, past: list[int], counts: list[int], mask: Array, **inputs: Any) -> Arrays:
        """Run a pass of ``counts`` tokens of each sequence behind ``past`` tokens.

        mask [W, W]: which tokens of a pass a token sees, cut to the sequence's count
        """
        positions = np.concatenate([np.arange(p, p + c) for p, c in zip(past, counts, strict=True)])
        packed = np.packbits(mask, axis=1, bitorder="little")
        packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)
        feeds = {
            "rope_rotary_cos_sin": self.cos_sin(positions),
            "positions": positions,
            "query_start_offsets": np.cumsum([0, *counts]),
            "query_lengths": np.array(counts),
            "past_lengths": np.array(past),
            "attention_sequence_lengths": np.add(past, counts),
            "state_indices": np.arange(self.num_sequences),
            "execution_phase_marker": np.zeros(4),
            "context_sequence_count_carrier": np.zeros(0),
            "kv_page_table": self.table,
            "attention_position_ids": positions,
            "packed_attention_mask": np.concatenate([packed[:count] for count in counts]),
            "tree_parent_ids": np.zeros(len(positions)),
            "tree_depths": np.zeros(len(positions)),
            "valid_tree_counts": np.array(counts),
            **self.caches,
            **inputs,
        }
        outputs = self.compute({name: np.asarray(feeds[name], kind) for name, kind in self.dtypes.items()})
        self.caches = {name: outputs[name.replace("past_", "present_")] for name in self.caches}
        return outputs

    def delta(self, starts: list[int], counts: list[int]) -> Arrays:
        """Where new context of each sequence lies, padded to the longest as the decoder does."""
        width = max(counts)
        places = np.arange(width)
        is_token = places < np.array(counts)[:, None]
        positions = np.where(is_token, np.array(starts)[:, None] + places, -1).reshape(-1)
        return {
            "dflash_delta_rope_cos_sin": self.cos_sin(positions),
            "dflash_delta_positions": positions,
            "dflash_delta_token_to_sequence": np.where(is_token, np.arange(len(counts))[:, None], -1).reshape(
                -1
            ),
        }


def check_chains(
    graph: Graph,
    head: ParallelDrafter,
    features: Sequence[Tensor] | Tensor,
    texts: Sequence[Tensor] | Tensor,
    lengths: Sequence[int],
    accepted: Sequence[Sequence[int]],
    *,
    top_k: int,
    block: int | None = None,
    hidden_states: Callable[[list[int], list[int]], Array] | None = None,
) -> None:
    """Prompts are read and drafted for in one batch, then steps follow; every chain is our runtime's.

    features: of every text [A, F*H]; texts: their tokens [A]; lengths: of the prompts
    accepted: tokens by which the texts grow in the steps; the other drafts are rejected
    block: tokens of a block, unless it has one for every frame
    hidden_states: what the engine hands over from places in the texts up to others; the features otherwise
    """
    count = block or head.config.num_frames
    known, read = list(lengths), [0] * len(lengths)
    for grown in (*accepted, [0] * len(lengths)):
        counts = [end - start for start, end in zip(read, known, strict=True)]
        delta = graph.delta(read, counts)
        owners = delta["dflash_delta_token_to_sequence"]
        # Padding is noise.
        new = np.random.default_rng(0).normal(size=(len(owners), head.config.feature_size))
        new[owners >= 0] = (
            hidden_states(read, known)
            if hidden_states
            else torch.cat([f[s:e] for f, s, e in zip(features, read, known, strict=True)]).numpy()
        )
        # The mask token is token 0, whose embedding the graph must not read.
        slots = torch.zeros(len(lengths), count, dtype=torch.int64)
        slots[:, 0] = torch.tensor([int(text[length]) for text, length in zip(texts, known, strict=True)])
        logits = graph.run(
            known,
            [count] * len(lengths),
            # The graph sees whole blocks whatever the decoder's mask says.
            np.tri(count, dtype=bool),
            inputs_embeds=head.embed(slots.flatten()).numpy(),
            dflash_target_hidden_concat=new,
            **delta,
        )["logits"].reshape(len(lengths), count, -1)
        for found, length, of_text, anchor in zip(logits, known, features, slots[:, 0], strict=True):
            options = {"frames": count, "num_drafts": count - 1, "top_k": top_k}
            chain = runtime_chain(head, of_text[:length], int(anchor), **options)
            # The decoder takes draft t from row t; the anchor's own row is not read.
            assert is_drafted(found[1:].argmax(-1).tolist(), chain)
            assert sorted(set(found[1].tolist())) == [NOT_DRAFTED, 0.0]
        read = list(known)
        known = [length + more for length, more in zip(known, grown, strict=True)]

"""The draft directory through the exporter of TensorRT Edge-LLM, whose graphs are then computed on a CPU.

    EDGE_LLM_SOURCE=PATH python -m pytest tests/integrations/edge_llm/test_exporter.py

PATH is an unpacked wheel of ``tensorrt-edgellm`` 0.11.0, of which only the exporter is used; it needs what
the extra ``export`` installs. The exported graphs have two operators of the engine's own, for attention over
pages of keys and values. They are computed here as their documentation says. What is checked:

- every weight that the exporter asks for is in the directory;
- the hidden states of the target model's graph are the features that a head is trained on;
- the logits of blocks are our head's: after prompts of different lengths in one batch, after steps whose
  drafts were accepted in part, and over the end of a page.

That the engine computes its operators so, and hands over these inputs, is not checked: it needs a GPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from safetensors.numpy import load_file
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.build_engines import main
from tests.integrations.transformers.models import make_head, make_model

SOURCE = os.environ.get("EDGE_LLM_SOURCE")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="EDGE_LLM_SOURCE names Edge-LLM's unpacked wheel")
Arrays = dict[str, NDArray[Any]]
PAGE_SIZE = 128
MASK_TOKEN, NUM_FRAMES = 5, 4
# Prompts' lengths; 126 and the tokens behind it lie on two pages.
LENGTHS = (126, 40)
# Tokens by which the texts grow in the steps; the other drafts are rejected.
ACCEPTED = ((3, 1), (1, 4))
# Graphs in half precision, relative to the largest value.
TOLERANCE = 5e-3


def rotated(heads: NDArray[Any], cos_sin: NDArray[Any]) -> NDArray[Any]:
    """heads [T, H, D] rotated by cos_sin [T, D], cosines before sines."""
    cos, sin = np.split(cos_sin[:, None].astype(np.float32), 2, axis=-1)
    first, second = np.split(heads.astype(np.float32), 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def normed(heads: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[Any]:
    """heads [T, H, D] by their root mean squares, times weight [D]."""
    values = heads.astype(np.float32)
    normalized: NDArray[Any] = values / np.sqrt(np.square(values).mean(-1, keepdims=True) + eps) * weight
    return normalized


def place(table: NDArray[Any], sequence: int, position: int, kind: int) -> tuple[int, int, int]:
    """Where a pool [2, pages, PAGE_SIZE, H, D] has a position's keys (kind 0) or values (1)."""
    page = int(table[sequence, kind, position // PAGE_SIZE])
    return kind, page - kind * int(table[:, 1].min()), position % PAGE_SIZE


class DFlashTargetKVCacheUpdate(OpRun):
    """Writes keys, which it rotates, and values of tokens to the positions of their sequences."""

    op_domain = "trt_edgellm"

    def _run(
        self,
        keys: NDArray[Any],
        values: NDArray[Any],
        pool: NDArray[Any],
        cos_sin: NDArray[Any],
        positions: NDArray[Any],
        owners: NDArray[Any],
        table: NDArray[Any],
    ) -> tuple[NDArray[Any]]:
        pool = pool.copy()
        keys = rotated(keys.reshape(len(positions), *pool.shape[3:]), cos_sin)
        values = values.reshape(len(positions), *pool.shape[3:])
        for token, (position, owner) in enumerate(zip(positions, owners, strict=True)):
            pool[place(table, owner, position, 0)] = keys[token]
            pool[place(table, owner, position, 1)] = values[token]
        return (pool,)


class AttentionPlugin(OpRun):
    """Attention of tokens over the tokens before them and over those of their own pass that a mask names."""

    op_domain = "trt_edgellm"

    def _run(
        self,
        qkv: NDArray[Any],
        pool: NDArray[Any],
        lengths: NDArray[Any],
        cos_sin: NDArray[Any],
        past: NDArray[Any],
        table: NDArray[Any],
        *inputs: NDArray[Any],
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        attention_scale: float,
        rms_norm_eps: float,
        enable_qk_norm: int,
        **_other: Any,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        *norms, packed_mask, _, offsets = inputs[: 5 if enable_qk_norm else 3]
        pool = pool.copy()
        heads = qkv.reshape(len(qkv), -1, head_size)
        queries, keys, values = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
        if norms:
            queries, keys = (
                normed(each, weight, rms_norm_eps)
                for each, weight in zip((queries, keys), norms, strict=True)
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
            scores = np.einsum("qhd,khd->hqk", queries[rows], seen_keys) * attention_scale
            bits = np.unpackbits(packed_mask[rows].view(np.uint8), axis=1, bitorder="little")[:, :count]
            allowed = np.concatenate((np.ones((count, before), bool), bits.astype(bool)), axis=1)
            scores = np.where(allowed, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            output[rows] = np.einsum("hqk,khd->qhd", weights, seen_values)
        return output, pool


class Graph:
    """One of the exported graphs, with its pool of keys and values."""

    def __init__(self, path: Path, num_sequences: int, max_length: int, rope_theta: float):
        model = onnx.load(path)
        self.runner = ReferenceEvaluator(model, new_ops=[AttentionPlugin, DFlashTargetKVCacheUpdate])
        self.inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        self.outputs = [value.name for value in model.graph.output]
        self.num_sequences, self.rope_theta = num_sequences, rope_theta
        pages = -(-max_length // PAGE_SIZE)
        # Pages in reverse order, so that a page is found by the table alone.
        keys = np.arange(num_sequences * pages, dtype=np.int32)[::-1].reshape(num_sequences, pages)
        self.table = np.stack((keys, keys + num_sequences * pages), axis=1)
        _, _, size, num_heads, head_dim = (
            axis.dim_value for axis in self.inputs["past_key_values_0"].shape.dim
        )
        self.head_dim = head_dim
        shape = (2, num_sequences * pages, size, num_heads, head_dim)
        caches = [name for name in self.inputs if name.startswith("past_key_values_")]
        self.caches = {name: np.zeros(shape, np.float16) for name in caches}

    def cos_sin(self, positions: NDArray[Any]) -> NDArray[Any]:
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None] * frequencies
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)

    def run(self, past: list[int], counts: list[int], mask: NDArray[Any], **inputs: Any) -> Arrays:
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
        typed = {
            name: np.asarray(feeds[name], onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
            for name, kind in self.inputs.items()
        }
        outputs = dict(zip(self.outputs, self.runner.run(None, typed), strict=True))
        self.caches = {name: outputs[name.replace("past_", "present_")] for name in self.caches}
        return outputs


def assert_close(found: NDArray[Any], expected: Tensor) -> None:
    values = expected.numpy()
    np.testing.assert_allclose(found, values, rtol=0, atol=TOLERANCE * np.abs(values).max())


def features_of(model: Any, layers: tuple[int, ...], tokens: Tensor) -> Tensor:
    """What decoder layers give for a text [A], side by side: [A, F*H]."""
    found: dict[int, Tensor] = {}
    handles = [
        model.model.layers[layer].register_forward_hook(
            lambda _module, _inputs, output, layer=layer: found.update({layer: output[0]})
        )
        for layer in layers
    ]
    model(tokens[None])
    for handle in handles:
        handle.remove()
    return torch.cat([found[layer] for layer in layers], dim=-1)


def block_logits(head: ParallelDrafter, features: Tensor, anchor: int) -> Tensor:
    """Our head's logits [T, V] of a block behind a context with features [A, F*H]."""
    length, count = len(features), head.config.num_frames
    hidden = head(
        features[None],
        torch.arange(length)[None],
        torch.tensor([[anchor]]),
        torch.arange(length, length + count)[None],
        torch.ones(1, 1, count, length + count, dtype=torch.bool),
    )
    return head.logits(hidden).reshape(count, -1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@torch.no_grad()
def test_blocks_of_the_exported_graphs(model_type: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_type, vocab_size=258)
    model_dir, draft, out = (tmp_path / name for name in ("model", "draft", "graphs"))
    model.save_pretrained(model_dir)
    for file in (*tiny_model_dir.glob("tokenizer*"), tiny_model_dir / "chat_template.jinja"):
        shutil.copy(file, model_dir)
    settings = {"num_layers": 2, "num_frames": NUM_FRAMES, "num_candidates": 9, "mask_token_id": MASK_TOKEN}
    head = make_head(model, "block", trunk="dspark", transition="markov", **settings)
    assert isinstance(head, ParallelDrafter)
    head.save_pretrained(tmp_path / "head")
    command = ["--model", str(model_dir), "--drafter", str(tmp_path / "head"), "--target", "edge-llm"]
    assert main([*command, "--out", str(draft)]) == 0
    command = [sys.executable, "-m", "tensorrt_edgellm.scripts.export", str(model_dir), str(out)]
    command += ["--dspark-base", "--dspark-draft", "--dspark-draft-dir", str(draft)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    embedding = load_file(out / "llm" / "embedding.safetensors")["embedding"]
    markov = load_file(out / "dspark_draft" / "dspark_heads.safetensors")
    assert head.transition is not None
    for label in range(3):
        bias = head.transition.of_previous(torch.tensor([label]), head.embed_tokens) @ (
            head.transition.of_following(torch.arange(head.config.label_count), head.draft_lm_head).mT
        )
        assert_close(markov["markov_w1"][[label]] @ markov["markov_w2"].T, bias)

    random = np.random.default_rng(0)
    size = max(LENGTHS) + 20
    texts = random.integers(0, model.config.vocab_size, (len(LENGTHS), size))
    features = [features_of(model, head.config.target_layer_ids, torch.tensor(text)) for text in texts]
    theta = head.config.rope_theta
    target_graph, draft_graph = (
        Graph(out / name / "model.onnx", len(LENGTHS), size, theta) for name in ("llm", "dspark_draft")
    )
    causal = np.tri(size, dtype=bool)
    block = np.ones((NUM_FRAMES, NUM_FRAMES), bool)

    known, read = list(LENGTHS), [0] * len(LENGTHS)
    for accepted in (*ACCEPTED, None):
        counts = [end - start for start, end in zip(read, known, strict=True)]
        tokens = np.concatenate([text[s:e] for text, s, e in zip(texts, read, known, strict=True)])
        outputs = target_graph.run(
            read,
            counts,
            causal,
            inputs_embeds=embedding[tokens],
            logits_indices=np.arange(len(tokens)),
        )
        hidden = outputs["hidden_states"]
        assert_close(hidden, torch.cat([f[s:e] for f, s, e in zip(features, read, known, strict=True)]))
        positions = np.concatenate([np.arange(s, e) for s, e in zip(read, known, strict=True)])
        slots = np.full((len(texts), NUM_FRAMES), MASK_TOKEN)
        slots[:, 0] = [text[length] for text, length in zip(texts, known, strict=True)]
        logits = draft_graph.run(
            known,
            [NUM_FRAMES] * len(texts),
            block,
            inputs_embeds=embedding[slots.reshape(-1)],
            dflash_target_hidden_concat=hidden,
            dflash_delta_rope_cos_sin=draft_graph.cos_sin(positions),
            dflash_delta_positions=positions,
            dflash_delta_token_to_sequence=np.repeat(np.arange(len(texts)), counts),
        )["logits"].reshape(len(texts), NUM_FRAMES, -1)
        for found, length, text, of_text in zip(logits, known, texts, features, strict=True):
            assert_close(found, block_logits(head, of_text[:length], int(text[length])))
        read = list(known)
        if accepted is not None:
            known = [length + count for length, count in zip(known, accepted, strict=True)]

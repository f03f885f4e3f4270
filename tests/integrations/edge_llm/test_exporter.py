"""The draft directories beside the exporter of TensorRT Edge-LLM, whose graphs are then computed on a CPU.

    EDGE_LLM_SOURCE=PATH python -m pytest tests/integrations/edge_llm/test_exporter.py

PATH is an unpacked wheel of ``tensorrt-edgellm`` 0.11.0, of which only the exporter is used; it needs what
the extra ``export`` installs. The exported graphs have two operators of the engine's own, for attention over
pages of keys and values. They are computed here as their documentation says. What is checked of a head in
DSpark's form:

- every weight that the exporter asks for is in the directory;
- the hidden states of the target model's graph are the features that a head is trained on;
- the logits of blocks are our head's: after prompts of different lengths in one batch, after steps whose
  drafts were accepted in part, and over the end of a page.

And of a draft graph of our own:

- its tensors, the nodes of the engine's operators and its configuration are those of a DFlash draft of the
  same sizes, which the exporter writes;
- the exporter takes the directory for the target model's graph, from whose hidden states come our chains.

That the engine computes its operators so, and hands over these inputs, is not checked: it needs a GPU.
"""

import json
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
from safetensors.numpy import load_file, save_file
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.build_engines import main
from tests.integrations.demo_texts import DEMO, HEADS, demo_texts
from tests.integrations.edge_llm.engine import Graph, check_chains
from tests.integrations.edge_llm.standard import check_compiles, onnx_runtime, write_standard
from tests.integrations.transformers.models import make_head, make_model

SOURCE = os.environ.get("EDGE_LLM_SOURCE")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="EDGE_LLM_SOURCE names Edge-LLM's unpacked wheel")
MASK_TOKEN, NUM_FRAMES = 5, 4
# The graphs are computed by a library that gathers from 32 elements at most.
TOP_K = 6
# Prompts' lengths; 126 and the tokens behind it lie on two pages.
LENGTHS = (126, 40)
# Tokens by which the texts grow in the steps; the other drafts are rejected.
ACCEPTED = ((3, 1), (1, 4))
# Graphs in half precision, relative to the largest value.
TOLERANCE = 5e-3


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


def save_model(model: Any, tokenizer_dir: Path, directory: Path) -> None:
    model.save_pretrained(directory)
    for file in (*tokenizer_dir.glob("tokenizer*"), tokenizer_dir / "chat_template.jinja"):
        shutil.copy(file, directory)


def export(model_dir: Path, out: Path, *options: str) -> None:
    """Run the engine's exporter."""
    command = [sys.executable, "-m", "tensorrt_edgellm.scripts.export", str(model_dir), str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@torch.no_grad()
def test_blocks_of_the_exported_graphs(model_type: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_type, vocab_size=258)
    model_dir, draft, out = (tmp_path / name for name in ("model", "draft", "graphs"))
    save_model(model, tiny_model_dir, model_dir)
    settings = {"num_layers": 2, "num_frames": NUM_FRAMES, "num_candidates": 9, "mask_token_id": MASK_TOKEN}
    head = make_head(model, "block", trunk="dspark", transition="markov", **settings)
    assert isinstance(head, ParallelDrafter)
    head.save_pretrained(tmp_path / "head")
    command = ["--model", str(model_dir), "--drafter", str(tmp_path / "head"), "--target", "edge-llm"]
    assert main([*command, "--out", str(draft)]) == 0
    export(model_dir, out, "--dspark-base", "--dspark-draft", "--dspark-draft-dir", str(draft))

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
        Graph.load(out / name / "model.onnx", len(LENGTHS), size, theta) for name in ("llm", "dspark_draft")
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


def save_dflash(head: ParallelDrafter, directory: Path) -> None:
    """A random checkpoint in DFlash's form with a head's sizes."""
    config = head.config
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, config.feature_size),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for layer in range(config.num_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    directory.mkdir()
    weights = {f"{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 512,
        "block_size": config.num_frames,
        "dflash_config": {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": 0},
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(fields))


def tensors_of(values: Any) -> dict[str, Any]:
    """Types and shapes by name."""
    return {value.name: value.type.SerializeToString() for value in values}


def plugins_of(model: onnx.ModelProto) -> list[Any]:
    """The nodes of the engine's operators: type, which inputs of the graph they read, attributes."""
    inputs = {value.name for value in model.graph.input}
    return [
        (
            node.op_type,
            [name if name in inputs else "" for name in node.input],
            # Left behind by the library with which the exporter writes.
            {
                each.name: onnx.helper.get_attribute_value(each)
                for each in node.attribute
                if each.name != "_outputs"
            },
        )
        for node in model.graph.node
        if node.domain == "trt_edgellm"
    ]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@torch.no_grad()
def test_a_draft_graph_beside_the_exporter_s(model_type: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_type, vocab_size=258)
    model_dir, draft, out, dflash, theirs = (
        tmp_path / name for name in ("model", "draft", "graphs", "dflash", "theirs")
    )
    save_model(model, tiny_model_dir, model_dir)
    head = make_head(model, frame_start="fused", transition="mlp", num_layers=2, num_frames=NUM_FRAMES)
    assert isinstance(head, ParallelDrafter)
    head.save_pretrained(tmp_path / "head")
    command = ["--model", str(model_dir), "--drafter", str(tmp_path / "head"), "--target", "edge-llm"]
    assert main([*command, "--top-k", str(TOP_K), "--out", str(draft)]) == 0
    save_dflash(head, dflash)
    export(model_dir, theirs, "--dflash-draft", "--dflash-draft-dir", str(dflash))
    ours, reference = (onnx.load(path / "model.onnx") for path in (draft, theirs / "dflash_draft"))
    assert tensors_of(ours.graph.input) == tensors_of(reference.graph.input)
    assert tensors_of(ours.graph.output) == tensors_of(reference.graph.output)
    expected = plugins_of(reference)
    for _, inputs, _ in expected:
        # Our graph makes the mask itself.
        inputs[:] = ["" if name == "packed_attention_mask" else name for name in inputs]
    assert plugins_of(ours) == expected
    configs = [json.loads((path / "config.json").read_text()) for path in (draft, theirs / "dflash_draft")]
    assert configs[0] == configs[1]

    export(model_dir, out, "--dflash-base", "--dflash-draft-dir", str(draft))
    assert (
        json.loads((out / "llm" / "config.json").read_text())["dflash_config"] == configs[0]["dflash_config"]
    )
    embedding = load_file(out / "llm" / "embedding.safetensors")["embedding"]
    size = max(LENGTHS) + 20
    texts = np.random.default_rng(0).integers(0, model.config.vocab_size, (len(LENGTHS), size))
    features = [features_of(model, head.config.target_layer_ids, torch.tensor(text)) for text in texts]
    target_graph, draft_graph = (
        Graph.load(path / "model.onnx", len(LENGTHS), size, head.config.rope_theta)
        for path in (out / "llm", draft)
    )

    def hidden_states(read: list[int], known: list[int]) -> NDArray[Any]:
        tokens = np.concatenate([text[s:e] for text, s, e in zip(texts, read, known, strict=True)])
        counts = [end - start for start, end in zip(read, known, strict=True)]
        found: NDArray[Any] = target_graph.run(
            read,
            counts,
            np.tri(size, dtype=bool),
            inputs_embeds=embedding[tokens],
            logits_indices=np.arange(len(tokens)),
        )["hidden_states"]
        return found

    following = [torch.tensor(text) for text in texts]
    options: dict[str, Any] = {"top_k": TOP_K, "hidden_states": hidden_states}
    check_chains(draft_graph, head, features, following, LENGTHS, ACCEPTED, **options)


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_the_demo_s_heads_on_real_texts(name: str, tmp_path: Path) -> None:
    """48 contexts of 4 texts, in half precision; the graph compiles without plug-ins."""
    head, features, following = demo_texts(name, count=4, length=60)
    command = ["--model", str(DEMO / "backbone"), "--drafter", str(DEMO / "heads" / name)]
    assert main([*command, "--target", "edge-llm", "--out", str(tmp_path / "draft")]) == 0
    path = write_standard(tmp_path / "draft" / "model.onnx", tmp_path / "model.onnx")
    graph = onnx_runtime(path, 4, 80, head.config.rope_theta)
    texts = [torch.cat((tokens[:1], tokens)) for tokens in following]
    grown = np.random.default_rng(0).integers(1, 5, (11, 4)).tolist()
    check_chains(graph, head, features, texts, (3, 9, 1, 5), grown, top_k=16)
    check_compiles(path, head.config, max_length=1024)

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
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.build_engines import main
from tests.integrations.edge_llm.engine import Graph
from tests.integrations.transformers.models import make_head, make_model

SOURCE = os.environ.get("EDGE_LLM_SOURCE")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="EDGE_LLM_SOURCE names Edge-LLM's unpacked wheel")
MASK_TOKEN, NUM_FRAMES = 5, 4
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

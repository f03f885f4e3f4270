"""Tokens per step on held-out text: which drafts are accepted, and that a decoder accepts the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.base import Drafter
from drafters.build import load_drafter
from export.options import Options
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from runtime.decoder import SpeculativeDecoder
from training.data.batches import LiveFeatures, all_anchors
from training.data.sequences import Sequences
from training.head_set import NUM_NODES, TOP_K
from training.loop.evaluation import accepted_path, evaluate

ANCHOR = 1
NEW_TOKENS = 24


def make_tree(*nodes: tuple[int, int]) -> TokenTree:
    """Nodes after the anchor, each (parent, token)."""
    parents = np.array([ROOT_PARENT, *(parent for parent, _ in nodes)], np.int64)
    tokens = np.array([ANCHOR, *(token for _, token in nodes)], np.int64)
    depths = np.zeros(parents.size, np.int64)
    for node in range(1, parents.size):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(tokens, parents, depths, np.zeros(parents.size))


CHAIN = make_tree((0, 5), (1, 6), (2, 7))
STAR = make_tree((0, 5), (0, 6), (0, 7))
# 5 6 | 5 8 9 | 6 5 6; the words of one branch appear in others.
BRANCHES = make_tree((0, 5), (0, 6), (1, 6), (1, 8), (2, 5), (4, 9), (5, 6))


@pytest.mark.parametrize(
    ("tree", "following", "expected"),
    [
        (TokenTree.root(ANCHOR), [5, 6], [0]),
        (CHAIN, [], [0]),
        (CHAIN, [4], [0]),
        (CHAIN, [ANCHOR, 5], [0]),
        (CHAIN, [6, 7], [0]),
        (CHAIN, [5], [0, 1]),
        (CHAIN, [5, 7], [0, 1]),
        (CHAIN, [5, 6, 7], [0, 1, 2, 3]),
        (CHAIN, [5, 6, 7, 8], [0, 1, 2, 3]),
        (STAR, [6, 7], [0, 2]),
        (STAR, [8], [0]),
        (BRANCHES, [5, 6, 9], [0, 1, 3]),
        (BRANCHES, [5, 8, 9], [0, 1, 4, 6]),
        (BRANCHES, [6, 8], [0, 2]),
        (BRANCHES, [6, 5, 6], [0, 2, 5, 7]),
        (BRANCHES, [6, 5, 8], [0, 2, 5]),
    ],
)
def test_accepted_path(tree: TokenTree, following: list[int], expected: list[int]) -> None:
    assert accepted_path(tree, following) == expected


def test_evaluate_looks_at_as_much_as_an_exported_head() -> None:
    assert Options.top_k == TOP_K


def test_evaluate_accepts_what_a_decoder_accepts(trained_head: Any, tiny_model_dir: Path) -> None:
    """Over the model's own text, the steps of a decode with as many nodes, one by one.

    Sequences end in ``evaluate``: the last step of each is cut there, in the decoder a little later.
    """
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_nodes=NUM_NODES, num_threads=1)
    depth = load_drafter(trained_head.directory).config.num_frames
    emitted = steps = 0
    rows = []
    for text in (*trained_head.prompts, "something new"):
        prompt = decoder.prompt_tokenizer.encode(text)
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS + depth, "stop_token_ids": ()}
        chunks = [chunk.token_ids for chunk in decoder.stream(prompt, **options)]
        rows.append((prompt, [token for chunk in chunks for token in chunk][:NEW_TOKENS]))
        left = NEW_TOKENS - 1
        for chunk in chunks[1:]:
            if left <= 0:
                break
            # All of the rest may be accepted, and one token after it.
            emitted += min(len(chunk), left + 1)
            left -= len(chunk)
            steps += 1

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    head = load_drafter(trained_head.directory).eval()
    head.attach_base(model.get_input_embeddings().weight, model.lm_head.weight)
    source, sequences = LiveFeatures(model, head.config.target_layer_ids), Sequences(rows)
    batches = [all_anchors(sequences, part, max_length=512) for part in ([0, 1, 2, 3], [4, 5])]
    found = evaluate(source, head, batches)
    assert found.num_steps == steps
    assert found.tokens_per_step == pytest.approx(emitted / steps, rel=1e-12)
    # It has learnt the prompts' text: more than the trees' roots is compared.
    assert found.tokens_per_step > 1.5

    assert found.log_probs.shape == found.accepted.shape
    assert found.log_probs.size <= NUM_NODES * steps
    assert found.accepted.sum() == emitted - steps
    assert (found.log_probs <= 1e-5).all()
    # Not every node is as likely as any other: what was accepted was thought more probable.
    assert found.log_probs[found.accepted].mean() > found.log_probs[~found.accepted].mean()


def test_evaluate_without_any_step(tiny_model_dir: Path, make_tiny_head: Callable[..., Drafter]) -> None:
    """A prompt and nothing after it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    sampled = all_anchors(Sequences([([5, 6, 7], [])]), [0], max_length=512)
    found = evaluate(LiveFeatures(model, (0, 1)), make_tiny_head(), [sampled])
    assert (found.num_steps, found.log_probs.size, found.accepted.size) == (0, 0, 0)

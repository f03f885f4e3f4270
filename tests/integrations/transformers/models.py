"""Tiny random models, heads for them, and drafts that are right as often as a test wants."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import Drafter
from drafters.build import build_drafter
from drafters.config import DrafterConfig
from integrations.transformers import head as head_module
from integrations.transformers.drafts import Context
from integrations.transformers.head import SpeculativeHead
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from tests.export.conftest import SIZES as OF_EXPORT

VOCAB_SIZE = 60
SIZES: dict[str, Any] = {
    **OF_EXPORT,
    "vocab_size": VOCAB_SIZE,
    # The greedy text after PROMPT has none; tests that need an end say which.
    "eos_token_id": 59,
    "tie_word_embeddings": False,
}
PAD: int = SIZES["pad_token_id"]
PROMPT = [5, 9, 31, 17, 9, 40, 22]


def make_model(model_type: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def make_head(model: Any, drafter_type: str = "ctc", **settings: Any) -> Drafter:
    """A random head for the model; few of its drafts are accepted."""
    base = model.config.get_text_config()
    config = DrafterConfig(
        drafter_type=drafter_type,
        **{
            "vocab_size": base.vocab_size,
            "hidden_size": base.hidden_size,
            "intermediate_size": 96,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "num_frames": 4,
            "base_num_layers": base.num_hidden_layers,
            "target_layer_ids": (0, base.num_hidden_layers - 1),
            **settings,
        },
    )
    torch.manual_seed(1)
    head = build_drafter(config)
    if head.draft_token_ids is not None:
        head.set_draft_vocabulary(torch.randperm(config.vocab_size)[: config.label_count].sort().values)
    head.attach_base(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return head.eval()


class KnownDrafts:
    """Random trees that hold the next tokens of known texts, or a part of them, at random places.

    Checks that every context is the text that the sequence has.
    """

    def __init__(self, texts: Sequence[Sequence[int]], share: float, seed: int = 0):
        """texts: of every sequence, without padding; share: how likely a known token is in the tree"""
        self._texts = [list(text) for text in texts]
        self._lengths = [0] * len(texts)
        self._share = share
        self._random = np.random.default_rng(seed)

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        trees = []
        for index, (context, root, text) in enumerate(zip(contexts, roots, self._texts, strict=True)):
            if root is None:
                trees.append(TokenTree.root(0))
                continue
            start = self._lengths[index]
            self._lengths[index] = end = start + len(context.tokens)
            assert context.features.shape[0] == len(context.tokens) > 0
            assert context.tokens.tolist() == text[start:end]
            assert root == text[end]
            trees.append(self._tree(root, text[end + 1 :], num_nodes))
        return trees

    def _tree(self, root: int, following: Sequence[int], num_nodes: int) -> TokenTree:
        tokens, parents, depths = [root], [ROOT_PARENT], [0]
        last_known = 0
        while len(tokens) <= num_nodes:
            depth = depths[last_known]
            known = depth < len(following) and self._random.random() < self._share
            parent = last_known if known else int(self._random.integers(len(tokens)))
            token = following[depth] if known else int(self._random.integers(VOCAB_SIZE))
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            if known:
                last_known = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return TokenTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(len(tokens)))


def with_drafts(monkeypatch: Any, head: SpeculativeHead, make: Callable[[], Any]) -> SpeculativeHead:
    """The head with other drafts than its own, made for every call."""
    monkeypatch.setattr(head_module, "new_drafts", lambda *_: make())
    return head

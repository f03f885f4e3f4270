"""The decode loop: draft, verify, accept, commit, for a batch of texts that may have different lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from integrations.transformers.drafts import Context, Drafts, shallow
from integrations.transformers.target_passes import TargetPasses
from integrations.transformers.texts import Text, TokenChooser
from integrations.transformers.tree_cache import TreeCache, Window
from runtime.core.token_tree import TokenTree


@dataclass(frozen=True)
class Prompts:
    """What ``generate`` has prepared.

    input_ids, position_ids: [B, P] int64
    attention_mask: [B, P], 0 at the left padding; None where there is none
    max_length: of a text, its prompt included
    cache: an empty cache of Transformers
    window: of the model's layers, if texts may become longer than it
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    max_length: int
    cache: Any
    window: Window | None = None
    chunk_size: int | None = None

    @property
    def is_text(self) -> Tensor:
        """[B, P] bool, False at the padding."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()


@dataclass(frozen=True)
class DecodedTexts:
    """num_tokens: new tokens of all texts; num_steps: of each text that had not ended, one a verify pass."""

    texts: list[Text]
    num_tokens: int
    num_steps: int


def decode(
    passes: TargetPasses, drafts: Drafts, chooser: TokenChooser, prompts: Prompts, *, num_nodes: int
) -> DecodedTexts:
    """Continue the prompts until all texts have ended. num_nodes: drafts of a tree at most."""
    is_text, input_ids = prompts.is_text, prompts.input_ids
    texts = [Text(ids) for ids in input_ids.unsqueeze(1).unbind()]
    logits, features = passes.prefill(
        input_ids,
        prompts.attention_mask,
        prompts.position_ids,
        prompts.cache,
        chunk_size=prompts.chunk_size,
    )
    cache = TreeCache(prompts.cache, is_text, prompts.window)
    parts = zip(input_ids, features, is_text, strict=True)
    contexts = [Context(ids[own], block[own]) for ids, block, own in parts]
    # The last token of a prompt is in the cache already, so nothing is verified: the first token is chosen.
    chooser.walk(texts, [TokenTree.root(0)] * len(texts), logits.unsqueeze(1))

    start, num_steps = input_ids.shape[1], 0
    first_positions = prompts.position_ids[:, -1] + 1
    while not all(text.ended for text in texts):
        room = cache.room()
        size = num_nodes if room is None else min(num_nodes, room - 1)
        roots = [None if text.ended else int(text.ids[0, -1]) for text in texts]
        trees = drafts.propose(contexts, roots, size)
        # A node after which no token can follow is of no use, and the model may have no position for it.
        lengths = [text.ids.shape[1] for text in texts]
        trees = [
            shallow(tree, max(prompts.max_length - 1 - length, 0))
            for tree, length in zip(trees, lengths, strict=True)
        ]

        written = torch.tensor([length - 1 - start for length in lengths], device=input_ids.device)
        logits, features = passes.verify(trees, cache, first_positions + written)
        num_steps += sum(not text.ended for text in texts)
        paths = chooser.walk(texts, trees, logits)

        cache.commit(paths, [not text.ended for text in texts])
        contexts = _accepted(trees, paths, features)
    num_tokens = sum(text.ids.shape[1] - start for text in texts)
    return DecodedTexts(texts, num_tokens, num_steps)


def _accepted(trees: Sequence[TokenTree], paths: Sequence[Any], features: Tensor) -> list[Context]:
    """The tokens and features of the accepted nodes, which are the next context."""
    found = []
    for index, (tree, path) in enumerate(zip(trees, paths, strict=True)):
        nodes = torch.from_numpy(path).to(features.device)
        tokens = torch.from_numpy(tree.tokens[path]).to(features.device)
        found.append(Context(tokens, features[index, nodes]))
    return found

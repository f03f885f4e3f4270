"""The decode loop, which drafts, verifies, accepts and commits, and the target model's passes.

The texts of a batch may have different lengths.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from drafters.features import FeatureTap
from integrations.transformers.drafts import Context, Drafts, shallow
from integrations.transformers.texts import Text, TokenChooser
from integrations.transformers.tree_cache import TreeCache, Window
from runtime.core.token_tree import TokenTree


@dataclass(frozen=True)
class Prompts:
    """The prompts as ``generate`` has prepared them.

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
    """The texts, how many tokens they got, and in how many steps.

    num_steps: verify passes, each counted once for every text that had not ended
    """

    texts: list[Text]
    num_tokens: int
    num_steps: int


def decode(
    passes: "TargetPasses", drafts: Drafts, chooser: TokenChooser, prompts: Prompts, *, num_nodes: int
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


class TargetPasses:
    """A causal LM of Transformers with the features of some of its layers. Ends with its ``with`` block."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...]):
        self._model = model
        self._tap = FeatureTap(model, layer_ids)
        # Logits of a prompt's other tokens are not needed, and may be larger than the model.
        keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if keeps_last else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tap.remove()

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,
        *,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read prompts [B, P], left-padded as ``attention_mask`` says, into an empty cache.

        Returns the last tokens' logits [B, V] and the features [B, P, F*H].
        """
        length = input_ids.shape[1]
        features = []
        for start in range(0, length, chunk_size or length):
            end = min(start + (chunk_size or length), length)
            output = self._model(
                input_ids=input_ids[:, start:end],
                attention_mask=None if attention_mask is None else attention_mask[:, :end],
                position_ids=position_ids[:, start:end],
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **self._last_only,
            )
            features.append(self._tap.take())
        return output.logits[:, -1], torch.cat(features, dim=1)

    def verify(
        self, trees: Sequence[TokenTree], cache: TreeCache, root_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass over a tree for each sequence, padded to the largest.

        root_positions: [B] int64, the positions of the trees' roots
        Returns logits [B, M, V] and features [B, M, F*H] of every node.
        """
        size = max(map(len, trees))
        tokens = np.zeros((2, len(trees), size), np.int64)
        for index, tree in enumerate(trees):
            tokens[0, index, : len(tree)] = tree.tokens
            tokens[1, index, : len(tree)] = tree.depths
        token_ids, depths = torch.from_numpy(tokens).to(self._model.device)
        output = self._model(
            input_ids=token_ids,
            attention_mask=cache.mask(trees, self._model.dtype),
            position_ids=root_positions.unsqueeze(1) + depths,
            past_key_values=cache.cache,
            use_cache=True,
            return_dict=True,
        )
        return output.logits, self._tap.take()

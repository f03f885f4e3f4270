"""The passes of a target model: reading prompts, and verifying a tree for every sequence."""

import inspect
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from drafters.features import FeatureTap
from integrations.transformers.tree_cache import TreeCache
from runtime.core.token_tree import TokenTree


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

"""Drafts of autoregressive heads: one pass for the root, one for every further level of a tree.

The sequences of a batch take turns, because every tree has levels of its own. What a pass reads is in the
table of ``drafters.autoregressive``.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from integrations.transformers.context_cache import ContextCache
from integrations.transformers.drafts import Context, DraftOptions
from runtime.core.level_expansion import Frontier, TreeExpansion
from runtime.core.options import CHAIN
from runtime.core.token_tree import TokenTree


class LevelDrafts:
    """``hydra`` and ``eagle`` heads."""

    def __init__(self, head: AutoregressiveDrafter, batch_size: int, options: DraftOptions):
        self._depth = head.config.num_frames
        self._options = options
        is_chain = options.shape == CHAIN
        self._beam_width = 1 if is_chain else options.beam_width
        self._top_k = 1 if is_chain else min(options.top_k, head.config.vocab_size)
        kind = HydraLevels if head.heads_per_depth else EagleLevels
        self._levels: list[Levels] = [kind(head) for _ in range(batch_size)]
        self._head = head

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        return [
            TokenTree.root(0) if root is None else self._tree(levels, context, root, num_nodes)
            for levels, context, root in zip(self._levels, contexts, roots, strict=True)
        ]

    def _tree(self, levels: "Levels", context: Context, root: int, num_nodes: int) -> TokenTree:
        expansion = TreeExpansion(root, num_nodes)
        expansion.add(*self._children(levels.read(context, root)))
        for _ in range(1, self._depth):
            frontier = expansion.frontier(self._beam_width, self._options.min_level_probability)
            if not frontier.tokens.size:
                break
            expansion.add(*self._children(levels.expand(frontier)))
        return expansion.tree()

    def _children(self, hidden: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        tokens, log_probs = self._head.best_children(hidden, self._top_k)
        return tokens.cpu().numpy(), log_probs.cpu().numpy()


class Levels(Protocol):
    """The passes of one sequence."""

    def read(self, context: Context, root: int) -> Tensor:
        """Read new context and the root after it: the root's hidden state [1, H]."""
        ...

    def expand(self, frontier: Frontier) -> Tensor:
        """Hidden states [F, H] of the next level; ``frontier.parents`` index the nodes of the last pass."""
        ...


class EagleLevels:
    """Every node attends to the context and to its ancestors, which follow the context in the cache."""

    def __init__(self, head: AutoregressiveDrafter):
        self._head = head
        self._cache = ContextCache()
        self._depth = 0
        # Of the last pass's nodes, [F, H] and [F, nodes of this tree so far].
        self._states = torch.empty(0)
        self._sees = torch.empty(0, 0, dtype=torch.bool)

    def read(self, context: Context, root: int) -> Tensor:
        start, count = self._cache.length, context.tokens.numel()
        self._cache.keep(start)
        self._depth = 0
        self._sees = torch.ones(1, 0, dtype=torch.bool)
        following = torch.cat((context.tokens[1:], context.tokens.new_tensor([root])))
        hidden = self._run(
            features=context.features.unsqueeze(0).to(next(self._head.parameters())),
            query_indices=torch.tensor([[count - 1]]),
            context_token_ids=following.unsqueeze(0),
            context_position_ids=torch.arange(start, start + count).unsqueeze(0),
            attn_mask=torch.ones(1, 1, 1, start + count, dtype=torch.bool),
        )
        self._cache.keep(start + count)
        return hidden

    def expand(self, frontier: Frontier) -> Tensor:
        self._depth += 1
        count, length = frontier.tokens.size, self._cache.length
        parents = torch.from_numpy(frontier.parents)
        own = torch.eye(count, dtype=torch.bool)
        self._sees = torch.cat((self._sees[parents], own), dim=1)
        context = torch.ones(count, length, dtype=torch.bool)
        return self._run(
            states=self._states[parents.to(self._states.device)].unsqueeze(0),
            token_ids=torch.from_numpy(frontier.tokens).unsqueeze(0),
            # The root has the last context position.
            position_ids=torch.full((1, count), length - 1 + self._depth),
            attn_mask=torch.cat((context, self._sees), dim=1)[None, None],
        )

    def _run(self, **inputs: Tensor) -> Tensor:
        hidden, states = self._head(complete(self._head, inputs), cache=self._cache)
        self._states = states[0]
        found: Tensor = hidden[0]
        return found


class HydraLevels:
    """Every depth has a head of its own, which reads the whole path; one state serves all nodes."""

    def __init__(self, head: AutoregressiveDrafter):
        self._head = head
        self._cache = ContextCache() if head.config.num_layers else None
        self._states = torch.empty(0)
        self._paths = torch.empty(0, 0, dtype=torch.int64)

    def read(self, context: Context, root: int) -> Tensor:
        self._paths = torch.tensor([[root]])
        features, count = context.features, context.tokens.numel()
        inputs = {"query_indices": torch.tensor([[count - 1]])}
        if self._cache is None:
            features, inputs = features[-1:], {"query_indices": torch.zeros(1, 1, dtype=torch.int64)}
        else:
            start = self._cache.length
            inputs["context_position_ids"] = torch.arange(start, start + count).unsqueeze(0)
            inputs["attn_mask"] = torch.ones(1, 1, 1, start + count, dtype=torch.bool)
        inputs["features"] = features.unsqueeze(0).to(next(self._head.parameters()))
        hidden = self._run(inputs)
        if self._cache is not None:
            self._cache.keep(self._cache.length + count)
        return hidden

    def expand(self, frontier: Frontier) -> Tensor:
        above = self._paths[torch.from_numpy(frontier.parents)]
        self._paths = torch.cat((above, torch.from_numpy(frontier.tokens).unsqueeze(1)), dim=1)
        inputs = {"states": self._states}
        if self._cache is not None:
            # No query attends: the root is not computed again.
            inputs["attn_mask"] = torch.ones(1, 1, 0, self._cache.length, dtype=torch.bool)
        return self._run(inputs)

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs[f"path_ids_{self._paths.shape[1] - 1}"] = self._paths.unsqueeze(0)
        hidden, self._states = self._head(complete(self._head, inputs), cache=self._cache)
        found: Tensor = hidden[0]
        return found


def complete(head: AutoregressiveDrafter, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """All inputs of a pass of one sequence, on the head's device: those not given are empty."""
    parameter = next(head.parameters())
    inputs = {}
    for name, (shape, dtype) in head.tensors.items():
        if name in given:
            inputs[name] = given[name].to(parameter.device)
            continue
        sizes = [1 if size == "B" else size if isinstance(size, int) else 0 for size in shape]
        kind = parameter.dtype if dtype.is_floating_point else dtype
        inputs[name] = torch.empty(sizes, dtype=kind, device=parameter.device)
    return inputs

"""The drafts of a head for a batch of sequences, and what draft trees are made with.

A parallel head fills the frames of all sequences in one pass, and a search makes trees of them. With an
autoregressive head the sequences take turns, because every tree has levels of its own: one pass for the root,
one for every further level. What a pass of such a head reads is in the table of ``drafters.autoregressive``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from integrations.transformers.tree_cache import ancestors
from runtime.core.lattice import Lattice
from runtime.core.level_expansion import Children, EagleLevels, Frontier, HydraLevels, Levels, expand_tree
from runtime.core.options import CHAIN, TREE
from runtime.core.prefix_search import chain_search, prefix_search
from runtime.core.token_tree import TokenTree

# Stands for the root of a sequence that has none.
NO_ROOT = 0


@dataclass(frozen=True)
class DraftOptions:
    """How many drafts a step verifies, and of which shape.

    num_nodes: draft nodes of a tree, its root not counted, or drafts of a chain
    shape: ``tree`` or ``chain``
    top_k: labels of a frame, or children of a node, that a head returns
    beam_width, min_level_probability: as in ``runtime.core.level_expansion``
    """

    num_nodes: int = 16
    shape: str = TREE
    top_k: int = 16
    beam_width: int = 4
    min_level_probability: float = 0.2


@dataclass(frozen=True)
class Context:
    """New context of a sequence: tokens [A] int64 and their features [A, F*H]."""

    tokens: Tensor
    features: Tensor


def new_drafts(head: Drafter, batch_size: int, options: DraftOptions) -> "Drafts":
    """The drafts of a head for sequences without any context yet."""
    if isinstance(head, AutoregressiveDrafter):
        return LevelDrafts(head, batch_size, options)
    assert isinstance(head, ParallelDrafter)
    return ParallelDrafts(head, batch_size, options)


def shallow(tree: TokenTree, depth: int) -> TokenTree:
    """The nodes of a tree up to a depth."""
    return tree.subset(np.flatnonzero(tree.depths <= depth))


class ContextCache:
    """A growing cache of a head's attention layers: the keys and values of its context.

    Every pass adds to it. ``keep`` removes what a pass added beyond the context, frames or draft nodes.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """As ``drafters.layers.KeyValueCache``: new keys and values [B, KH, N, D] -> all, [B, KH, S, D]."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            key, value = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        self._layers[layer] = key, value
        return key, value

    def keep(self, length: int) -> None:
        """Forget what follows the first ``length`` slots."""
        self.length = length
        self._layers = {
            layer: (keys[:, :, :length], values[:, :, :length])
            for layer, (keys, values) in self._layers.items()
        }


class ParallelDrafts:
    """The drafts of ``ctc``, ``block`` and ``medusa`` heads for a batch, each sequence with its own context.

    New context is padded on the right to the longest of the batch. The padding stays in the cache of an
    attention head, where no frame sees it.
    """

    def __init__(self, head: ParallelDrafter, batch_size: int, options: DraftOptions):
        self._head = head
        self._options = options
        self._attends = head.config.trunk_type.attends
        self._cache = ContextCache() if self._attends else None
        # Which slots of the cache hold context, [B, S], and how many tokens of it there are.
        self._is_context = torch.zeros(batch_size, 0, dtype=torch.bool)
        self._lengths = torch.zeros(batch_size, dtype=torch.int64)

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        """Read new context and draft after each root; the tree of a sequence that has none is empty.

        contexts: what has come since the last call; A is at least 1 unless the sequence has no root
        num_nodes: drafts of a tree at most; 0 for none
        """
        search = chain_search if self._options.shape == CHAIN else prefix_search
        lattices = self._lattices(contexts, [NO_ROOT if root is None else root for root in roots])
        return [
            TokenTree.root(NO_ROOT) if root is None else search(lattice, root_token=root, num_nodes=num_nodes)
            for lattice, root in zip(lattices, roots, strict=True)
        ]

    def _lattices(self, contexts: Sequence[Context], roots: Sequence[int]) -> list[Lattice]:
        head, config = self._head, self._head.config
        blocks = [context.features for context in contexts]
        counts = torch.tensor([block.shape[0] for block in blocks])
        starts, ends = self._lengths, self._lengths + counts
        self._lengths = ends
        if not self._attends:
            # Only the feature before the root is read.
            blocks = [block[-1:] for block in blocks]
            starts = ends - 1
        parameter = next(head.parameters())
        device = parameter.device
        features = pad_sequence(blocks, batch_first=True).to(parameter)
        width, frames = features.shape[1], config.num_frames
        context_positions = starts.unsqueeze(1) + torch.arange(width)
        frame_positions = ends.unsqueeze(1) + torch.arange(frames)
        anchors = torch.tensor(roots, device=device)
        hidden = head(
            features,
            context_positions.to(device),
            anchors.unsqueeze(1),
            frame_positions.to(device),
            self._mask(counts, width).to(device) if self._attends else None,
            cache=self._cache,
        )
        if self._cache is not None:
            self._cache.keep(self._cache.length + width)
        found = lattice_tensors(head, hidden, anchors, width=min(self._options.top_k, config.label_count))
        arrays = found.arrays()
        return [
            Lattice.of_outputs(
                {name: array[index] for name, array in arrays.items()}, merges_repeats=config.merges_repeats
            )
            for index in range(len(contexts))
        ]

    def _mask(self, counts: torch.Tensor, width: int) -> torch.Tensor:
        """[B, 1, T, S]: every frame sees its sequence's context and all of its frames."""
        new = torch.arange(width) < counts.unsqueeze(1)
        self._is_context = torch.cat((self._is_context, new), dim=1)
        frames = torch.ones(counts.numel(), self._head.config.num_frames, dtype=torch.bool)
        seen = torch.cat((self._is_context, frames), dim=1)
        return seen[:, None, None].expand(-1, -1, frames.shape[1], -1)


class LevelDrafts:
    """The same of ``hydra`` and ``eagle`` heads."""

    def __init__(self, head: AutoregressiveDrafter, batch_size: int, options: DraftOptions):
        self._head = head
        self._options = options
        is_chain = options.shape == CHAIN
        self._beam_width = 1 if is_chain else options.beam_width
        top_k = 1 if is_chain else min(options.top_k, head.config.label_count)
        self._passes = [HeadPasses(head, top_k) for _ in range(batch_size)]

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        return [
            TokenTree.root(NO_ROOT) if root is None else self._tree(passes, context, root, num_nodes)
            for passes, context, root in zip(self._passes, contexts, roots, strict=True)
        ]

    def _tree(self, passes: "HeadPasses", context: Context, root: int, num_nodes: int) -> TokenTree:
        children = passes.run_root(context, root)
        levels: Levels = HydraLevels(passes, root) if self._head.heads_per_depth else EagleLevels(passes)
        return expand_tree(
            levels,
            root,
            children,
            num_nodes=num_nodes,
            max_depth=self._head.config.num_frames,
            beam_width=self._beam_width,
            min_level_probability=self._options.min_level_probability,
        )


Drafts = ParallelDrafts | LevelDrafts


class HeadPasses:
    """The passes of an autoregressive head for one sequence, as ``LevelPasses`` and for the root."""

    def __init__(self, head: AutoregressiveDrafter, top_k: int):
        """top_k: children of a node"""
        self._head = head
        self._top_k = top_k
        self._cache = ContextCache() if "attn_mask" in head.tensors else None
        # [1, P, H], of the last pass.
        self._states = torch.empty(0)

    def run_root(self, context: Context, root: int) -> Children:
        """Read new context and the root after it. The next passes are those of the root's tree."""
        features, count, inputs = context.features, context.tokens.numel(), {}
        if self._cache is None:
            # Only the feature before the root is read.
            features, count = features[-1:], 1
        else:
            start = self._cache.length
            # The nodes of the last tree are forgotten.
            self._cache.keep(start)
            inputs["context_position_ids"] = torch.arange(start, start + count).unsqueeze(0)
            inputs["attn_mask"] = torch.ones(1, 1, 1, start + count, dtype=torch.bool)
        inputs["features"] = features.unsqueeze(0).to(next(self._head.parameters()))
        inputs["query_indices"] = torch.tensor([[count - 1]])
        if self._head.heads_per_depth:
            inputs["path_ids_0"] = torch.tensor([[[root]]])
        else:
            following = torch.cat((context.tokens[1:], context.tokens.new_tensor([root])))
            inputs["context_token_ids"] = following.unsqueeze(0)
        children = self._run(inputs)
        if self._cache is not None:
            self._cache.keep(self._cache.length + count)
        return children

    def run_nodes(self, frontier: Frontier, parents: NDArray[np.int64], depth: int) -> Children:
        assert self._cache is not None
        count, length = frontier.tokens.size, self._cache.length
        above = torch.from_numpy(frontier.parents).to(self._states.device)
        # The nodes so far follow the context in the cache.
        context = torch.ones(count, length, dtype=torch.bool)
        seen = torch.from_numpy(ancestors(parents, parents.size)[-count:])
        return self._run(
            {
                "states": self._states[:, above],
                "token_ids": torch.from_numpy(frontier.tokens).unsqueeze(0),
                # The root has the last context position.
                "position_ids": torch.full((1, count), length - 1 + depth),
                "attn_mask": torch.cat((context, seen), dim=1)[None, None],
            }
        )

    def run_paths(self, paths: NDArray[np.int64]) -> Children:
        # The root's state serves all nodes.
        inputs = {"states": self._states, f"path_ids_{paths.shape[1] - 1}": torch.from_numpy(paths)[None]}
        if self._cache is not None:
            # No query attends, because the root is not computed again.
            inputs["attn_mask"] = torch.ones(1, 1, 0, self._cache.length, dtype=torch.bool)
        return self._run(inputs)

    def _run(self, inputs: dict[str, Tensor]) -> Children:
        hidden, self._states = self._head(complete(self._head, inputs), cache=self._cache)
        tokens, log_probs = self._head.best_children(hidden[0], self._top_k)
        return Children(tokens.cpu().numpy(), log_probs.cpu().numpy())


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

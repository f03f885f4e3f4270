"""Drafts of parallel heads: one pass fills the frames of all sequences, a search makes them trees."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from integrations.transformers.context_cache import ContextCache
from integrations.transformers.drafts import Context, DraftOptions
from runtime.core.lattice import Lattice
from runtime.core.options import CHAIN
from runtime.core.prefix_search import chain_search, prefix_search
from runtime.core.token_tree import TokenTree

# The root of a sequence that has none.
NO_ROOT = 0


class ParallelDrafts:
    """``ctc``, ``block`` and ``medusa`` heads.

    New context is padded on the right to the longest of the batch. The padding stays in the cache of an
    attention head, where no frame sees it.
    """

    def __init__(self, head: ParallelDrafter, batch_size: int, options: DraftOptions):
        self._head = head
        self._options = options
        self._attends = head.config.trunk == "attention"
        self._cache = ContextCache() if self._attends else None
        # Which slots of the cache hold context, [B, S], and how many tokens of it there are.
        self._is_context = torch.zeros(batch_size, 0, dtype=torch.bool)
        self._lengths = torch.zeros(batch_size, dtype=torch.int64)

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        lattices = self._lattices(contexts, [NO_ROOT if root is None else root for root in roots])
        return [
            TokenTree.root(NO_ROOT) if root is None else self._search(lattice, root, num_nodes)
            for lattice, root in zip(lattices, roots, strict=True)
        ]

    def _search(self, lattice: Lattice, root: int, num_nodes: int) -> TokenTree:
        transform = chain_search if self._options.shape == CHAIN else prefix_search
        return transform(lattice, root_token=root, num_nodes=num_nodes)

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
        found = lattice_tensors(head, hidden, anchors, width=min(self._options.top_k, config.vocab_size))
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

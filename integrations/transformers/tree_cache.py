"""A cache of Transformers while token trees are verified.

A place along the sequence axis of the cache is a slot. Slots [0, length) of a sequence hold its text, from
the prompt's left padding on. The sequences of a batch get texts of different lengths, because they accept
different numbers of drafts. A pass writes the trees of all of them behind the longest text:

    slots      0 1 2 3 4 5 6 | 7 8 9 ...
    sequence 0 a b c d e f g | root and draft nodes
    sequence 1 - a b c d . . | root and draft nodes        -: left padding   .: hidden from every node

``commit`` moves the keys and values of the accepted nodes behind each text, and removes the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from runtime.core.token_tree import TokenTree

# Masks of a model whose layers are of several kinds, by the names in its ``layer_types``.
FULL, SLIDING = "full_attention", "sliding_attention"
# [B, 1, M, S], or one for each kind of layer.
TreeMask = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Window:
    """Layers that attend to the last ``size`` tokens: all of a model's, or those of the kind ``SLIDING``."""

    size: int
    everywhere: bool


def window_of(config: Any) -> Window | None:
    """The sliding window of a model's layers; None where none has one, or not all of them the same."""
    layers = DynamicCache(config=config).layers
    sizes = {layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or [SLIDING]
    if len(sizes) != 1 or not set(kinds) <= {FULL, SLIDING}:
        return None
    return Window(sizes.pop(), all(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers))


def capacity(cache: Cache) -> int | None:
    """Slots of a cache before a layer begins to forget or is full; None where it grows without limit."""
    limits = []
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            limits.append(layer.max_cache_len)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            limits.append(layer.sliding_window - 1)
    return min(limits, default=None)


def ancestors(parents: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Which nodes a node sees, [size, size]: its ancestors and itself.

    parents: [N] int64, N at most ``size``, because nodes beyond the tree are padding; -1 for no parent among
        the nodes
    """
    seen = np.eye(size, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class TreeCache:
    """Masks and slots of the passes over a cache that holds the prompts.

    lengths: [B] int64, how many slots the text of each sequence has
    """

    def __init__(self, cache: Cache, prompt_mask: Tensor, window: Window | None = None):
        """prompt_mask: [B, P] bool, False at the left padding

        window: of a model whose window is narrower than its texts; the cache keeps what leaves the window
        """
        self.cache = cache
        self._window = window
        self.capacity = capacity(cache)
        batch_size, length = prompt_mask.shape
        self.lengths = torch.full((batch_size,), length)
        self._is_text, self._device = prompt_mask.cpu(), prompt_mask.device
        # Slots in use before a tree, and those that the last tree took.
        self._length, self._added = length, 0

    def room(self) -> int | None:
        """Slots that are left for a tree, its root included; None for any number."""
        return None if self.capacity is None else self.capacity - self._length

    def mask(self, trees: Sequence[TokenTree], dtype: torch.dtype) -> TreeMask:
        """The mask of a pass over one tree for each sequence, which will be written to the cache.

        Returns [B, 1, M, S] of ``dtype``, M the nodes of the largest tree: 0 where a node attends, else the
        type's least number. With a window that not all layers have, one for each kind of layer.
        """
        size = self._added = max(map(len, trees))
        num_slots = self.cache.get_mask_sizes(size, 0)[0]
        end = self._length + size
        slots = torch.arange(self._length)
        text = slots < self.lengths.unsqueeze(1)
        prompt = min(self._is_text.shape[1], self._length)
        text[:, :prompt] &= self._is_text[:, :prompt]
        visible = torch.zeros(len(trees), size, num_slots, dtype=torch.bool)
        visible[:, :, : self._length] = text.unsqueeze(1)
        seen = np.stack([ancestors(tree.parents, size) for tree in trees])
        visible[:, :, self._length : end] = torch.from_numpy(seen)
        if self._window is None:
            return self._additive(visible, dtype)
        # The place of a node in its sequence, were it text. What is beyond the trees is not visible anyway.
        depths = torch.zeros(len(trees), size, dtype=torch.int64)
        for index, tree in enumerate(trees):
            depths[index, : len(tree)] = torch.from_numpy(tree.depths)
        places = self.lengths.unsqueeze(1) + depths
        keys = torch.zeros(len(trees), num_slots, dtype=torch.int64)
        keys[:, : self._length], keys[:, self._length : end] = slots, places
        near = keys.unsqueeze(1) > places.unsqueeze(2) - self._window.size
        sliding = self._additive(visible & near, dtype)
        return (
            sliding if self._window.everywhere else {FULL: self._additive(visible, dtype), SLIDING: sliding}
        )

    def _additive(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """What attention adds to its scores, on the model's device: [B, M, S] bool -> [B, 1, M, S]."""
        least = torch.finfo(dtype).min
        return torch.where(visible.to(self._device), 0.0, least).to(dtype).unsqueeze(1)

    def commit(self, paths: Sequence[NDArray[np.int64]], is_live: Sequence[bool]) -> None:
        """Keep the nodes ``paths[b]`` [A_b] of the last trees as text, and forget the others.

        is_live: whether a sequence goes on. Where the cache is limited, a sequence that does not loses its
            slots, because the trees of the others need the room.
        """
        counts = torch.tensor([path.size for path in paths])
        width = max(int(counts.max()), 1)
        sources = torch.zeros(len(paths), width, dtype=torch.int64)
        for index, path in enumerate(paths):
            sources[index, : path.size] = torch.from_numpy(path)
        sources += self._length
        # Slots beyond a path are copied too, but to where nothing sees them: behind the sequence's text.
        targets = self.lengths.unsqueeze(1) + torch.arange(width)
        targets = torch.where(counts.unsqueeze(1) > 0, targets, sources)
        in_place = torch.equal(sources, targets)
        end = self._length + self._added
        self.lengths += counts
        keeps = torch.ones(len(paths), dtype=torch.bool)
        if self.capacity is not None:
            # When all have ended, those that ended last stay.
            keeps = torch.tensor(is_live) if any(is_live) else counts > 0
        self._length = int(self.lengths[keeps].max())
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if not in_place:
                _move(layer.keys, sources, targets)
                _move(layer.values, sources, targets)
            _shorten(layer, self._length, end - self._length)


def _move(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots [B, A] of keys or values [B, KH, S, D] to other slots of the same sequence."""
    shape = (-1, states.shape[1], -1, states.shape[3])
    taken = states.gather(2, sources.to(states.device)[:, None, :, None].expand(shape))
    states.scatter_(2, targets.to(states.device)[:, None, :, None].expand(shape), taken)


def _shorten(layer: Any, length: int, removed: int) -> None:
    """Leave ``length`` slots in a layer that has ``removed`` more."""
    if isinstance(layer, StaticLayer):
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
    elif removed:
        layer.crop(-removed)

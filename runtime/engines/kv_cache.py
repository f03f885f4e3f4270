"""The key/value cache in the host's memory, and the attention masks over its positions.

Every layer is in one slab, which grows in buckets: the standard operators of attention compute over the whole
capacity, so the capacity follows the longest context in use.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.errors import CacheMemoryError, RequestError
from runtime.engines.huge_pages import huge_zeros

# Less capacity pays where it is this part of the cache's, at most: for a copy of a short text's keys and
# values, and for a smaller slab. With a larger part the slab would move again and again while texts of
# similar lengths come and go.
SHORT_PART = 4
# A slab that grows gets this part of a text's length as further room, so that copying stays a constant cost
# per token. More room would make every pass slower, because a pass computes over the whole capacity.
GROWTH_PART = 8
# Positions in which a slab grows, and those where attention computes over the keys that a row sees and not
# over the capacity. Whenever a slab moves, every shape of a pass has to be bound anew. So one that grows in
# large buckets does not shrink between two texts either, if it has no more than KEPT_BUCKETS.
BUCKET, LARGE_BUCKET = 64, 256
KEPT_BUCKETS = 2
# Address alignment of the slab in bytes: a line of the processor's cache.
ALIGNMENT = 64


class SlabKVCache:
    """Keys and values of all layers, by slot and position. Every slot has the same capacity S.

    slab: [2L, B, KH, S, D] float32, keys of layer i at 2i, values at 2i+1; B slots

    Slots start as zeros and never hold NaN: a masked position still enters the product with weight 0.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_capacity: int,
        bucket: int = BUCKET,
        kept_buckets: int = 1,
    ):
        """kept_buckets: a slab that is no larger does not shrink when all slots are free"""
        self.bucket = _round_up(bucket, 8)
        self._kept_capacity = kept_buckets * self.bucket
        self.max_capacity = _round_up(max_capacity, 8)
        self._shape = (2 * num_layers, num_slots, num_kv_heads, 0, head_dim)
        # Called whenever the slab moves: a pass that is bound to its address must be bound again. The
        # reference is weak, because the engine that owns the method also owns the cache.
        self.on_move: WeakMethod[Callable[[], None]] | None = None
        # The slots that hold sequences, and the number of first slots that have held one since the last
        # time that all were free. Memory beyond these is untouched.
        self._in_use: set[int] = set()
        self._num_touched = 0
        self.slab = self._allocate(min(self.bucket, self.max_capacity))
        # What an engine has made of the slab, by the slots; it is dropped with the slab.
        self.tensors: dict[tuple[int, int], Any] = {}

    @property
    def capacity(self) -> int:
        """Positions a slot holds now: S."""
        return self.slab.shape[3]

    @property
    def num_slots(self) -> int:
        return self._shape[1]

    def short_capacity(self, length: int) -> int | None:
        """The capacity of a copy for texts of ``length`` positions; None where a copy would not pay.

        It is a power of two of buckets, so that passes have few shapes.
        """
        capacity = self.bucket
        while capacity < length:
            capacity *= 2
        return capacity if capacity * SHORT_PART <= self.capacity else None

    def of_capacity(self, capacity: int, num_slots: int) -> "SlabKVCache":
        """An empty cache of another capacity for the same layers."""
        layers, _, heads, _, head_dim = self._shape
        return SlabKVCache(
            num_layers=layers // 2,
            num_slots=num_slots,
            num_kv_heads=heads,
            head_dim=head_dim,
            max_capacity=capacity,
            bucket=capacity,
        )

    def reserve(self, length: int, num_slots: int) -> None:
        """Make room for ``length`` positions in the first ``num_slots`` slots, which are about to be written.

        Raises RequestError beyond ``max_capacity``, and CacheMemoryError.

        If the slab moves, only the slots that were touched are copied, so that a lone sequence does not wait
        for the memory of all slots.
        """
        if length > self.max_capacity:
            raise RequestError(
                f"KV cache: {length} positions are needed, the capacity is {self.max_capacity}"
            )
        self._in_use.update(range(num_slots))
        touched, capacity = self._num_touched, self.capacity
        if length > capacity:
            wanted = self._with_room(length)
            try:
                slab = self._allocate(min(wanted, self.max_capacity))
            except MemoryError as error:
                raise CacheMemoryError(
                    f"KV cache: the host has no memory for {wanted} positions of {self.num_slots} texts"
                ) from error
            slab[:, :touched, :, :capacity] = self.slab[:, :touched]
            slab[:, :touched, :, capacity:] = 0
            self._move(slab)
        self._touch(num_slots)

    def fit(self, length: int, num_slots: int) -> None:
        """Reserve, and give back the capacity that a longer text has left in slots beside these.

        A pass computes over the whole capacity, so a long text that has ended would slow down those that are
        left. Raises what ``reserve`` raises.
        """
        self.reserve(length, num_slots)
        wanted = min(self._with_room(length), self.max_capacity)
        # The slots behind these may hold longer texts.
        if wanted * SHORT_PART > self.capacity or len(self._in_use) > num_slots:
            return
        with contextlib.suppress(MemoryError):  # a host without memory keeps the long slab
            slab = self._allocate(wanted)
            slab[:, : self._num_touched] = self.slab[:, : self._num_touched, :, :wanted]
            self._move(slab)

    def _with_room(self, length: int) -> int:
        """The capacity for texts of ``length`` positions that go on for another bucket at least."""
        return _round_up(length + max(length // GROWTH_PART, self.bucket), self.bucket)

    def _touch(self, num_slots: int) -> None:
        """Write the whole parts of the first slots, if that was not done before.

        The slab is zero already, but the system provides memory on the first write. So a server's memory does
        not grow until every slot has held a long text.
        """
        if num_slots > self._num_touched:
            self.slab[:, self._num_touched : num_slots] = 0
            self._num_touched = num_slots

    def release(self, slot: int) -> None:
        """Mark a slot as free; its contents are lost.

        With the last slot a slab of more than ``kept_buckets`` shrinks to one bucket, so that a short prompt
        after a long one pays for its own length only.
        """
        self._in_use.discard(slot)
        if not self._in_use:
            self._num_touched = 0
            if self.capacity > self._kept_capacity:
                with contextlib.suppress(MemoryError):  # a host without memory keeps the long slab
                    self._move(self._allocate(min(self.bucket, self.max_capacity)))

    def _move(self, slab: NDArray[np.float32]) -> None:
        self.slab = slab
        self.tensors.clear()
        on_move = self.on_move() if self.on_move else None
        if on_move:
            on_move()

    def randomize(self, num_slots: int, length: int) -> None:
        """Fill the first ``length`` positions of the first slots with random numbers, to test passes."""
        part = self.slab[:, :num_slots, :, :length]
        part[:] = np.random.default_rng(0).standard_normal(part.shape, np.float32)

    def read(self, slot: int, start: int, end: int) -> NDArray[np.float32]:
        """A copy of the positions from ``start`` to ``end`` of a slot, [2L, KH, end - start, D]."""
        return self.slab[:, slot, :, start:end].copy()

    def write(self, slot: int, blocks: Sequence[NDArray[np.float32]]) -> None:
        """Begin a free slot with what ``read`` has returned, one block behind the other."""
        self.reserve(sum(block.shape[2] for block in blocks), slot + 1)
        start = 0
        for block in blocks:
            end = start + block.shape[2]
            self.slab[:, slot, :, start:end] = block
            start = end

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        """Exchange the first ``lengths`` positions of two slots; 0 for a slot that is free."""
        kept, moved = lengths
        self._touch(max(first, second) + 1)
        # One array at a time, so that the copy in between stays small.
        for cached in self.slab:
            copy = cached[first, :, :kept].copy()
            cached[first, :, :moved] = cached[second, :, :moved]
            cached[second, :, :kept] = copy
        exchanged = {first: second, second: first}
        self._in_use = {exchanged.get(slot, slot) for slot in self._in_use}

    def commit(self, starts: Sequence[int], paths: Sequence[NDArray[np.int64]]) -> None:
        """Keep the accepted positions of verified trees and pack them behind the prefixes.

        Position ``starts[b] + paths[b][i]`` of slot b moves to ``starts[b] + i``.

        starts, paths: one for each of the first slots; a path [A_b] int64 ascends from 0
        """
        for slot, (start, path) in enumerate(zip(starts, paths, strict=True)):
            # A path ascends from 0, so this one is already in place.
            if path[-1] == path.size - 1:
                continue
            cached = self.slab[:, slot]
            cached[:, :, start : start + path.size] = cached[:, :, start + path]

    def _allocate(self, capacity: int) -> NDArray[np.float32]:
        shape = (*self._shape[:3], capacity, self._shape[4])
        size = 4 * int(np.prod(shape))
        if self.num_slots == 1:
            return huge_zeros(size).view(np.float32).reshape(shape)
        # The slots of a layer are neighbours, so with huge pages those in use would take the memory of all.
        raw = np.zeros(size + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        return raw[offset : offset + size].view(np.float32).reshape(shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@njit(cache=True)
def fill_tree_mask(
    mask: NDArray[np.bool_], parents: NDArray[np.int64], prefix_length: int, first: int = 0
) -> None:
    """Write a tree's mask for its nodes from ``first`` on.

    mask [N - first, S]: the row of node i becomes True at the prefix's columns ``[0, prefix_length)``
    and, at ``prefix_length + j``, for i itself and every ancestor j of i.
    Example: parents (-1, 0, 0, 1), prefix_length 1 -> rows 1100 0, 1110 0, 1101 0, 1110 1.
    """
    for node in range(first, parents.size):
        row = mask[node - first]
        row[:prefix_length] = True
        row[prefix_length:] = False
        ancestor = node
        while ancestor >= 0:
            row[prefix_length + ancestor] = True
            ancestor = parents[ancestor]


@njit(cache=True)
def fill_padding_mask(mask: NDArray[np.bool_], first: int, prefix_length: int) -> None:
    """Write the mask of padding: row i of [N, S], from ``first`` on, attends to its own position alone."""
    for node in range(first, mask.shape[0]):
        mask[node] = False
        mask[node, prefix_length + node] = True


@njit(cache=True)
def fill_causal_mask(mask: NDArray[np.bool_], prefix_length: int) -> None:
    """Write a prompt chunk's mask: row i of [N, S] is True up to column prefix_length + i."""
    for row in range(mask.shape[0]):
        mask[row, : prefix_length + row + 1] = True
        mask[row, prefix_length + row + 1 :] = False


def fill_frame_mask(mask: NDArray[np.bool_], length: int, first_frame: int) -> None:
    """Write the mask of T frames: all rows of [T, S] attend to the context and to all frames."""
    mask[:, :length] = True
    mask[:, length:] = False
    mask[:, first_frame : first_frame + mask.shape[0]] = True

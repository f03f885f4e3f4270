"""Blocks of keys and values in a device's memory, for prompts that begin as earlier texts do.

The memory has slots of the shape that a sequence's slot has in the caches, so one copy moves the positions of
a block for all heads of a layer's keys or values. ``runtime.decode.prefix_cache`` says what is in a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.decode.prefix_cache import BLOCK_SIZE
from runtime.device.device import ALIGNMENT, ITEM_SIZES, Device, DeviceArray


@dataclass(frozen=True)
class StoredBlock:
    """A block's place among those of a store. The place is free again when nobody has the object any more."""

    place: int
    nbytes: int
    free_places: list[int]

    def __del__(self) -> None:
        self.free_places.append(self.place)


class BlockStore:
    """Copies blocks between the slots of caches and memory of its own.

    caches, head_caches: those of the target model and of the draft head, [B, KH, S, D] each
    num_bytes: of all blocks that fit; 0 if the caches of one slot are larger than ``max_bytes``
    """

    def __init__(
        self,
        device: Device,
        caches: Sequence[DeviceArray],
        head_caches: Sequence[DeviceArray],
        max_bytes: int,
    ):
        self._device = device
        every = (*caches, *head_caches)
        num_slots = max_bytes // sum(cache.rows(0, 1).nbytes for cache in every)
        # The cache and its memory; and by how many positions the head's blocks begin earlier.
        wanted = [replace(cache, shape=(num_slots, *cache.shape[1:])) for cache in every]
        # All at once, because a device that lacks memory for the last of them would keep the others.
        memory = device.allocate((sum(map(_room, wanted)),), "bool").address
        self._pairs = []
        for index, (cache, each) in enumerate(zip(every, wanted, strict=True)):
            self._pairs.append((cache, replace(each, address=memory), int(index >= len(caches))))
            memory += _room(each)
        self._per_slot = min(cache.shape[2] for cache in every) // BLOCK_SIZE
        self._free_places = list(range(num_slots * self._per_slot))
        self._block_bytes = sum(BLOCK_SIZE * cache.shape[1] * _row_bytes(cache) for cache in every)
        # A block is copied before an old one makes room for it.
        self.num_bytes = max(0, len(self._free_places) - 1) * self._block_bytes

    def save(self, slot: int, start: int, end: int) -> StoredBlock:
        """Copy the positions of a block from a slot."""
        block = StoredBlock(self._free_places.pop(), self._block_bytes, self._free_places)
        for cache, memory, shift in self._pairs:
            first = max(start - shift, 0)
            self._copy((cache, slot, first), (memory, *self._place(block)), end - shift - first)
        return block

    def load(self, slot: int, blocks: Sequence[StoredBlock]) -> None:
        """Copy blocks into a slot, one behind the other."""
        for index, block in enumerate(blocks):
            start, end = index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE
            for cache, memory, shift in self._pairs:
                first = max(start - shift, 0)
                self._copy((memory, *self._place(block)), (cache, slot, first), end - shift - first)

    def _place(self, block: StoredBlock) -> tuple[int, int]:
        """The slot of the memory that a block is in, and its first position there."""
        slot, index = divmod(block.place, self._per_slot)
        return slot, index * BLOCK_SIZE

    def _copy(
        self, source: tuple[DeviceArray, int, int], target: tuple[DeviceArray, int, int], count: int
    ) -> None:
        """Copy ``count`` positions. Source and target are an array, a slot and the first position each."""
        cache = source[0]
        row = _row_bytes(cache)
        self._device.copy_blocks(
            _from_position(*source),
            _from_position(*target),
            count=cache.shape[1],
            size=count * row,
            pitch=cache.shape[2] * row,
        )


def _room(array: DeviceArray) -> int:
    """Bytes of an array and of what aligns the next one."""
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def _row_bytes(cache: DeviceArray) -> int:
    """Bytes of one position of one head."""
    return cache.shape[3] * ITEM_SIZES[cache.dtype]


def _from_position(cache: DeviceArray, slot: int, position: int) -> DeviceArray:
    """The memory of a slot from a position on, as bytes."""
    row = cache.rows(slot, slot + 1)
    offset = position * _row_bytes(cache)
    return DeviceArray(row.address + offset, (row.nbytes - offset,), "bool")

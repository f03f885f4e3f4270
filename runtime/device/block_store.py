"""Blocks of keys and values in a device's memory, for prompts that begin as earlier texts do.

The memory has slots of the shape that a sequence's slot has in the caches, so one copy moves the positions of
a block for all heads of a layer's keys or values. ``runtime.decode.prefix_cache`` says what is in a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.decode.prefix_cache import BLOCK_SIZE
from runtime.device.device import ALIGNMENT, ITEM_SIZES, Device, DeviceArray

# A cache, a slot of it and the first position there.
Positions = tuple[DeviceArray, int, int]


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
        for part, stored, count in self._parts(block, slot, start, end):
            copy_positions(self._device, part, stored, count)
        return block

    def load(self, slot: int, blocks: Sequence[StoredBlock]) -> None:
        """Copy blocks into a slot, one behind the other."""
        for index, block in enumerate(blocks):
            start = index * BLOCK_SIZE
            for part, stored, count in self._parts(block, slot, start, start + BLOCK_SIZE):
                copy_positions(self._device, stored, part, count)

    def _parts(
        self, block: StoredBlock, slot: int, start: int, end: int
    ) -> Iterator[tuple[Positions, Positions, int]]:
        """Of every cache: where a block begins in a slot, where in the store, and its number of positions."""
        stored_slot, index = divmod(block.place, self._per_slot)
        for cache, memory, shift in self._pairs:
            first = max(start - shift, 0)
            yield (cache, slot, first), (memory, stored_slot, index * BLOCK_SIZE), end - shift - first


def copy_positions(device: Device, source: Positions, target: Positions, count: int) -> None:
    """Copy ``count`` positions of all heads."""
    cache = source[0]
    row = _row_bytes(cache)
    device.copy_blocks(
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

"""The key/value cache in the host's memory: every layer in one slab, grown in buckets.

ONNX Runtime's CPU attention computes over the whole capacity, so the capacity follows the longest context in
use.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import RequestError

ALIGNMENT = 64


class SlabKVCache:
    """``slab``: [2L, B, KH, S, D] float32, keys of layer i at 2i, values at 2i+1; B slots.

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
        bucket: int = 256,
    ):
        self.bucket = _round_up(bucket, 8)
        self.max_capacity = _round_up(max_capacity, 8)
        self._shape = (2 * num_layers, num_slots, num_kv_heads, 0, head_dim)
        # Increased whenever the slab moves: whoever holds its address must bind again.
        self.version = 0
        # The slots that hold sequences, and the number of first slots that have held one since the last
        # time that all were free. Memory beyond these is untouched.
        self._in_use: set[int] = set()
        self._num_touched = 0
        self.slab = self._allocate(min(self.bucket, self.max_capacity))

    @property
    def capacity(self) -> int:
        """Positions a slot holds now: S."""
        return self.slab.shape[3]

    def reserve(self, length: int, num_slots: int) -> None:
        """As ``KVCache.reserve``. Raises RequestError beyond ``max_capacity``.

        If the slab moves, only the slots that were touched are copied, so that a lone sequence does not wait
        for the memory of all slots.
        """
        if length > self.max_capacity:
            raise RequestError(
                f"KV cache: {length} positions are needed, the capacity is {self.max_capacity}"
            )
        self._in_use.update(range(num_slots))
        touched = self._num_touched
        self._num_touched = max(touched, num_slots)
        capacity = self.capacity
        if length > capacity:
            # The slab grows by at least a quarter, so that copying stays a constant cost per token.
            wanted = _round_up(max(length, capacity * 5 // 4), self.bucket)
            slab = self._allocate(min(wanted, self.max_capacity))
            slab[:, :touched, :, :capacity] = self.slab[:, :touched]
            slab[:, :touched, :, capacity:] = 0
            self.slab = slab
            self.version += 1
        # The slab is zero already, but the system provides memory on the first write. Writing a slot's whole
        # part here keeps a server's memory from growing until every slot has held a long text.
        if num_slots > touched:
            self.slab[:, touched:num_slots] = 0

    def release(self, slot: int) -> None:
        """As ``KVCache.release``. With the last slot the slab shrinks to one bucket, so that a short prompt
        after a long one pays for its own length only."""
        self._in_use.discard(slot)
        if not self._in_use:
            self._num_touched = 0
            if self.capacity > self.bucket:
                self.slab = self._allocate(min(self.bucket, self.max_capacity))
                self.version += 1

    def move(self, source: int, target: int, length: int) -> None:
        """As ``KVCache.move``."""
        self.slab[:, target, :, :length] = self.slab[:, source, :, :length]
        self._in_use.add(target)
        self._in_use.discard(source)

    def commit(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        paths: NDArray[np.int64],
        counts: Sequence[int],
    ) -> None:
        """As ``KVCache.commit``."""
        for slot, start, path, count in zip(slots, starts, paths, counts, strict=True):
            # A path ascends from 0, so this one is already in place.
            if path[count - 1] == count - 1:
                continue
            cached = self.slab[:, slot]
            cached[:, :, start : start + count] = cached[:, :, start + path[:count]]

    def _allocate(self, capacity: int) -> NDArray[np.float32]:
        shape = (*self._shape[:3], capacity, self._shape[4])
        count = int(np.prod(shape))
        raw = np.zeros(count * 4 + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        return raw[offset : offset + count * 4].view(np.float32).reshape(shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

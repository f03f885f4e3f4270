"""The key/value cache of one graph: every layer in one slab, grown in buckets.

ONNX Runtime's CPU attention computes over the whole capacity, so the capacity follows the context
in use; on a device with static graphs one bucket of the full length serves.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.errors import RequestError

ALIGNMENT = 64


class KVCache:
    """``slab``: [2L, B, KH, S, D] float32, keys of layer i at 2i, values at 2i+1.

    Rows start as zeros and never hold NaN: a masked row still enters the product with weight 0.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        max_capacity: int,
        bucket: int = 256,
    ):
        self.bucket = _round_up(bucket, 8)
        self.max_capacity = _round_up(max_capacity, 8)
        self._shape = (2 * num_layers, batch_size, num_kv_heads, 0, head_dim)
        # Bumped whenever the slab moves: whoever holds its address must bind again.
        self.version = 0
        # Sequences that may hold anything: the first ones.
        self._num_used = 0
        self.slab = self._allocate(min(self.bucket, self.max_capacity))

    @property
    def capacity(self) -> int:
        """Rows the slab holds now: S."""
        return self.slab.shape[3]

    def reserve(self, length: int, num_sequences: int | None = None) -> None:
        """Make room for ``length`` rows. Raises RequestError beyond ``max_capacity``.

        num_sequences: the first ones, which are about to be written (None: all). If the slab moves, it takes
        along what these and those of earlier calls hold, and no more: a lone sequence does not wait for the
        memory of all others.
        """
        if length > self.max_capacity:
            raise RequestError(f"KV cache: {length} rows are needed, the capacity is {self.max_capacity}")
        held = self._num_used
        self._num_used = used = max(held, self._shape[1] if num_sequences is None else num_sequences)
        capacity = self.capacity
        if length > capacity:
            # At least a quarter more each time, so that copying stays a constant cost per token.
            wanted = _round_up(max(length, capacity * 5 // 4), self.bucket)
            slab = self._allocate(min(wanted, self.max_capacity))
            slab[:, :held, :, :capacity] = self.slab[:, :held]
            slab[:, :held, :, capacity:] = 0
            self.slab = slab
            self.version += 1
        # Zeros already, but the system gives memory when it is first written to. All of a sequence's at once:
        # a server's memory would grow for as long as it takes until every row has held a long text.
        if used > held:
            self.slab[:, held:used] = 0

    def shrink(self) -> None:
        """Forget all sequences, and back to the first bucket: a short prompt after a long one pays for its
        own length only."""
        self._num_used = 0
        if self.capacity > self.bucket:
            self.slab = self._allocate(min(self.bucket, self.max_capacity))
            self.version += 1

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` rows of one sequence over another's."""
        self.slab[:, target, :, :length] = self.slab[:, source, :, :length]

    def commit(self, row: int, start: int, path: NDArray[np.int64]) -> None:
        """Keep the accepted rows ``start + path`` of a sequence, moved to ``start, start + 1, ...``."""
        if path[-1] == path.size - 1:  # path ascends from 0, so it is already in place
            return
        rows = self.slab[:, row]
        rows[:, :, start : start + path.size] = rows[:, :, start + path]

    def _allocate(self, capacity: int) -> NDArray[np.float32]:
        shape = (*self._shape[:3], capacity, self._shape[4])
        count = int(np.prod(shape))
        raw = np.zeros(count * 4 + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        return raw[offset : offset + count * 4].view(np.float32).reshape(shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""Reused prefixes: the keys and values of texts that were read or written before, in blocks of tokens.

A conversation's next prompt begins with all of its earlier turns, and many prompts begin with the same system
message. A block has the keys and values of ``BLOCK_SIZE`` neighbouring tokens, of the target model and of the
draft head of a batch. Its key is a hash of its tokens and of all tokens before them, since keys and values
depend on both. The blocks that have not been used for longest go first.

The last token of a known prefix is read again: the next token follows from its logits, and an EAGLE head has
no entry for it before the token after it is known. So the head's part of a block is one token behind.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Tokens of a block. A smaller one reuses more of a prefix, and takes more copies.
BLOCK_SIZE = 16
KEY_BYTES = 16


class PrefixBlock(Protocol):
    """Copies of the keys and values of a block, wherever a step runner keeps them."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class HostBlock:
    """A block in the host's memory: [2L, KH, BLOCK_SIZE, D] of each model.

    The head's part of a text's first block is one position shorter.
    """

    target_model: NDArray[Any]
    head: NDArray[Any]

    @property
    def nbytes(self) -> int:
        return self.target_model.nbytes + self.head.nbytes


def block_keys(tokens: NDArray[np.int64]) -> list[bytes]:
    """The keys of all whole blocks of a text [L]. Each is the hash of a block and of the key before it."""
    keys, key = [], b""
    for start in range(0, tokens.size - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = tokens[start : start + BLOCK_SIZE].tobytes()
        key = hashlib.blake2b(block, key=key, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Blocks by their keys, of ``max_bytes`` at most."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Tokens of prompts that were not read because their blocks were here.
        self.num_hit_tokens = 0
        # Those that were used last are last.
        self._blocks: OrderedDict[bytes, PrefixBlock] = OrderedDict()

    def num_known(self, keys: Sequence[bytes]) -> int:
        """How many of a text's first blocks are here."""
        return next((index for index, key in enumerate(keys) if key not in self._blocks), len(keys))

    def take(self, keys: Sequence[bytes]) -> list[PrefixBlock]:
        """A text's first blocks, as far as they are here."""
        known = keys[: self.num_known(keys)]
        self._touch(known)
        return [self._blocks[key] for key in known]

    def add(self, keys: Sequence[bytes], copy: Callable[[int, int], PrefixBlock | None]) -> None:
        """Keep a text's blocks, as many of the first ones as there is room for.

        copy: makes the block of the positions from ``start`` to ``end``; called for those that are not here.
            None if it cannot be made yet.
        """
        self._touch(keys)
        own = set(keys)
        for index, key in enumerate(keys):
            if key not in self._blocks:
                block = copy(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
                if block is None or not self._make_room(block.nbytes, own):
                    break
                self._blocks[key] = block
                self.num_bytes += block.nbytes
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are used. The first is needed by all others, so it goes last."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def _make_room(self, num_bytes: int, kept: set[bytes]) -> bool:
        """Drop old blocks until a new one fits; False if only ``kept`` are left, which stay."""
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in kept:
                return False
            self.num_bytes -= self._blocks.pop(oldest).nbytes
        return True

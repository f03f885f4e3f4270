"""What the decode step asks of a draft head, plain decoding, and what heads keep of every sequence."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import CacheMemoryError
from runtime.core.token_tree import TokenTree
from runtime.engines.protocol import Engine, Features
from runtime.engines.recorder import Recorder

# A head reads new context when it drafts. Where no drafts are wanted, the context waits until it has this
# many tokens and is then read in one pass. A larger number takes more memory, a smaller one more passes.
MAX_PENDING_TOKENS = 512


class Proposer:
    """Proposes token trees. Every sequence has the slot that it has in the target model's cache.

    One that keeps nothing of the sequences has ``propose`` alone.
    """

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        """Take the tokens [A_b] that have just become the context of each slot.

        features: what the pass that read them says for drafting, such as their hidden states
        """

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        """A tree of at most ``num_nodes`` drafts for each of the first slots, below its last token.

        Raises CacheMemoryError where the head's cache finds no memory; the call may be repeated then.
        Marks the stage ``draft`` when the head's passes are done; what follows belongs to ``search``.
        """
        raise NotImplementedError

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences of two slots, of which one may be free."""

    def save_context(self, slot: int, start: int, end: int) -> NDArray[np.float32]:
        """A copy of the head's keys and values of a slot's context from ``start`` to ``end``.

        The context has at least one token more. The result is empty where a head keeps none.
        """
        return np.empty(0, np.float32)

    def load_context(
        self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[NDArray[np.float32]]
    ) -> None:
        """Begin a free slot with a context [L], whose keys and values were saved in neighbouring blocks."""

    def release(self, slot: int) -> None:
        """Forget a slot's context."""


def swap_entries(entries: list[Any], first: int, second: int) -> None:
    """Exchange what two slots have in a list."""
    entries[first], entries[second] = entries[second], entries[first]


class NoProposer(Proposer):
    """Plain decoding, and steps without drafts: every tree is a lone root."""

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        recorder.mark("draft")
        return [TokenTree.root(token) for token in last_tokens]


class PendingContext:
    """Context of one slot that the head has not read yet: tokens and their features."""

    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int64]] = []
        self._features: list[NDArray[np.float32]] = []
        self.num_tokens = 0

    def append(self, tokens: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """tokens [A], features [A, F*H]; both are copied."""
        self._tokens.append(tokens.copy())
        self._features.append(features.copy())
        self.num_tokens += tokens.size

    def joined(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if len(self._tokens) == 1:
            return self._tokens[0], self._features[0]
        return np.concatenate(self._tokens), np.concatenate(self._features)


class HeadSlots(Proposer):
    """Keeps for every slot how long the context in the head's cache is, and which context is still unread."""

    def __init__(self, engine: Engine, max_num_seqs: int):
        self.engine = engine
        self._lengths = [0] * max_num_seqs
        self._pending = [PendingContext() for _ in range(max_num_seqs)]
        self._has_layers = engine.kv.read(0, 0, 0).shape[0] > 0

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        for slot, tokens, block in zip(slots, token_ids, features.to_host(), strict=True):
            if self._pending[slot].num_tokens >= MAX_PENDING_TOKENS:
                # Without memory the context waits for the next draft, which fails then. Nothing may fail
                # here, because the target model has read the tokens already.
                with contextlib.suppress(CacheMemoryError):
                    self._read(slot, *self.unread(slot), int(tokens[0]))
                    self._pending[slot] = PendingContext()
            self._pending[slot].append(tokens, block)

    def _read(
        self, slot: int, tokens: NDArray[np.int64], features: NDArray[np.float32], following: int
    ) -> object:
        """Bring context of a slot into the head's cache; ``following`` is the token after it.

        Raises CacheMemoryError, and changes nothing then.
        """
        raise NotImplementedError

    def unread(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The tokens and features that the head has not read of a slot.

        Raises RuntimeError where there are none, because a draft needs at least one.
        """
        if not self._pending[slot].num_tokens:
            raise RuntimeError("a draft needs features: call append_context() first")
        return self._pending[slot].joined()

    def read_all_but_last(self, slot: int) -> None:
        """Read a slot's unread context but for its last token."""
        tokens, features = self.unread(slot)
        self._read(slot, tokens[:-1], features[:-1], int(tokens[-1]))
        self._pending[slot] = PendingContext()
        self._pending[slot].append(tokens[-1:], features[-1:])

    def swap(self, first: int, second: int) -> None:
        self.engine.kv.swap(first, second, (self._lengths[first], self._lengths[second]))
        swap_entries(self._lengths, first, second)
        swap_entries(self._pending, first, second)

    def save_context(self, slot: int, start: int, end: int) -> NDArray[np.float32]:
        if self._has_layers and self._lengths[slot] < end:
            self.read_all_but_last(slot)
        return self.engine.kv.read(slot, start, end)

    def load_context(
        self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[NDArray[np.float32]]
    ) -> None:
        if self._has_layers:
            self.engine.kv.write(slot, blocks)
        self._lengths[slot] = tokens.size

    def release(self, slot: int) -> None:
        self.engine.kv.release(slot)
        self._lengths[slot] = 0
        self._pending[slot] = PendingContext()

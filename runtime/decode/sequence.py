"""One text while it is decoded: where it stands, how its tokens are chosen, what text they make."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runtime.decode.acceptance import Acceptor
from runtime.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Piece:
    """One token of the output: its text (possibly empty) and whether the draft head proposed it.

    log_prob: the target model's own, where ``SamplingParams.log_probs`` asks for it
    """

    token_id: int
    text: str
    drafted: bool
    log_prob: float | None = None


@dataclass(frozen=True)
class Chunk:
    """What one step added. ``finish_reason`` is ``stop`` or ``length`` on the last chunk only."""

    pieces: tuple[Piece, ...]
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]


class SequenceState:
    """A sequence of a batch.

    length: tokens in the key/value cache, of the prompt and then of the output
    last_token: the last committed token, which is not in the cache yet; -1 while the prompt is prefilled
    """

    def __init__(
        self,
        prompt: NDArray[np.int64],
        *,
        max_new_tokens: int,
        stop_token_ids: frozenset[int],
        detokenizer: Detokenizer,
        acceptor: Acceptor,
    ):
        self.prompt = prompt
        self.acceptor = acceptor
        self.length = 0
        self.last_token = -1
        self._remaining = max_new_tokens
        self._stop_token_ids = stop_token_ids
        self._detokenizer = detokenizer

    def append(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> Chunk:
        """Take a step's tokens and return their text.

        The chunk ends at a stop token, at a stop string or at the last token wanted. The last of the tokens
        is the target model's own, the others were drafted. A stop token has no text.
        """
        self.last_token = token_ids[-1]
        pieces: list[Piece] = []
        finish_reason = None
        for index, token_id in enumerate(token_ids):
            is_stop = token_id in self._stop_token_ids
            text = "" if is_stop else self._detokenizer.push(token_id)
            drafted = index < len(token_ids) - 1
            pieces.append(Piece(token_id, text, drafted, log_probs[index] if log_probs else None))
            if self._detokenizer.stopped or is_stop:
                finish_reason = "stop"
            elif len(pieces) == self._remaining:
                finish_reason = "length"
            if finish_reason:
                pieces[-1] = replace(pieces[-1], text=pieces[-1].text + self._detokenizer.flush())
                break
        self._remaining -= len(pieces)
        return Chunk(tuple(pieces), finish_reason)

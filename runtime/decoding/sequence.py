"""One request while it is decoded: where it stands, how its tokens are chosen, what text they make."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.acceptance import Acceptor
from runtime.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Piece:
    """One token of the output: its text (possibly empty) and whether the draft head proposed it.

    log_prob: the model's own, where ``SamplingParams.log_probs`` asks for it
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


class Row:
    """A sequence of a batch.

    length: tokens in the key/value cache, of the prompt and then of the output
    anchor: the last token, which is not in the cache yet; there is none before the prompt has been read
    """

    def __init__(
        self,
        prompt: NDArray[np.int64],
        *,
        max_new_tokens: int,
        stops: frozenset[int],
        detokenizer: Detokenizer,
        acceptor: Acceptor,
    ):
        self.prompt = prompt
        self.acceptor = acceptor
        self.length = 0
        self.anchor = -1
        self._remaining = max_new_tokens
        self._stops = stops
        self._detokenizer = detokenizer

    def emit(self, token_ids: list[int], log_probs: tuple[float, ...]) -> Chunk:
        """Text of a step's tokens, cut at a stop token, at a stop string or at the last token wanted.

        The last of them is the backbone's own, the others were drafted. A stop token has no text.
        """
        pieces = []
        finish = None
        for index, token_id in enumerate(token_ids):
            log_prob = log_probs[index] if log_probs else None
            drafted = index < len(token_ids) - 1
            is_stop = token_id in self._stops
            text = "" if is_stop else self._detokenizer.push(token_id)
            pieces.append(Piece(token_id, text, drafted, log_prob))
            if self._detokenizer.stopped or is_stop:
                finish = "stop"
            elif len(pieces) == self._remaining:
                finish = "length"
            if finish:
                last = pieces[-1]
                pieces[-1] = replace(last, text=last.text + self._detokenizer.flush())
                break
        self._remaining -= len(pieces)
        return Chunk(tuple(pieces), finish)

"""The texts of a batch. Their tokens are chosen as ``generate`` chooses them, and each may end the text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import generation

from runtime.core.token_tree import TokenTree

# Processors that treat every sequence of a batch alike, wherever it stands in the batch.
ALIKE = (
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.MinPLogitsWarper,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
)
# Stands for the next token where a text has ended. No node has it, so the walk along the tree ends too.
ENDED = -1


@dataclass
class Text:
    """One sequence: ids [1, n] int64, the left padding included.

    scores, logits: [V] float32 of every new token, after and before the processors, if they are kept
    """

    ids: Tensor
    ended: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class TokenChooser:
    """Chooses the tokens of a batch's texts.

    At every node of the walk the processors see the text up to this node and the target model's logits
    there, as they would without drafts; the token is the most probable one or drawn. Stopping
    criteria are asked about each text by itself after every token, as they would be in a batch of one.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        is_ended: Callable[[Tensor, Any], Tensor],
        *,
        do_sample: bool,
        keep_scores: bool = False,
        keep_logits: bool = False,
        on_token: Callable[[int], None] | None = None,
    ):
        """is_ended: the stopping criteria; on_token: is called with each new token"""
        self._processors = processors
        self._is_ended = is_ended
        self._do_sample = do_sample
        self._keep_scores, self._keep_logits = keep_scores, keep_logits
        self._on_token = on_token
        self._all_alike = all(map(_is_alike, processors))
        self._needs_logits = bool(len(processors)) or do_sample or keep_scores or keep_logits

    def walk(
        self, texts: Sequence[Text], trees: Sequence[TokenTree], logits: Tensor
    ) -> list[NDArray[np.int64]]:
        """Append to each text the tokens chosen along its tree; logits [B, M, V].

        Returns the accepted path of each tree, [A_b] int64 node indices from the root, and an empty one
        for a text that had ended before.
        """
        likeliest = None if self._needs_logits else logits.argmax(-1).cpu().numpy()
        paths = []
        for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            if text.ended:
                paths.append(np.empty(0, np.int64))
                continue

            def choose(node: int, index: int = index, text: Text = text) -> int:
                if likeliest is None:
                    token = self._token(texts, index, logits[index, node])
                else:
                    token = int(likeliest[index, node])
                self._append(text, token)
                return ENDED if text.ended else token

            paths.append(tree.walk(choose)[0])
        return paths

    def _token(self, texts: Sequence[Text], index: int, logits: Tensor) -> int:
        text = texts[index]
        ids = text.ids
        raw = logits.float().unsqueeze(0)
        # A copy, because processors may write to it.
        scores = raw.to(ids.device, copy=True)
        # A processor may keep something for every place of a batch, so the sequence stands at its own place.
        copies = 1 if self._all_alike else len(texts)
        scores = scores.repeat(copies, 1)
        ids = ids.repeat(copies, 1)
        for processor in self._processors:
            scores = processor(ids, scores)
        scores = scores[index if copies > 1 else 0].unsqueeze(0)
        if self._keep_scores:
            text.scores.append(scores[0])
        if self._keep_logits:
            text.logits.append(raw[0].to(scores.device, copy=True))
        if self._do_sample:
            return int(torch.multinomial(scores.softmax(-1), num_samples=1))
        return int(scores.argmax(-1))

    def _append(self, text: Text, token: int) -> None:
        text.ids = torch.cat((text.ids, text.ids.new_tensor([[token]])), dim=1)
        if self._on_token is not None:
            self._on_token(token)
        scores = tuple(score.unsqueeze(0) for score in text.scores) if self._keep_scores else None
        text.ended = bool(self._is_ended(text.ids, scores).all())


def _is_alike(processor: Any) -> bool:
    # In a batch with padding the penalty for repetitions has lengths for every place.
    lengths = getattr(processor, "prompt_ignore_length", None)
    return type(processor) in ALIKE and not isinstance(lengths, Tensor)


def padded(texts: Sequence[Text], pad_token_id: int) -> Tensor:
    """The texts as one tensor [B, n], padded on the right."""
    ids = [text.ids[0] for text in texts]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad_token_id)


def steps(values: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Scores [V] of every text and token -> of every step [B, V]; zeros where a text has ended."""
    length = max(map(len, values), default=0)
    empty = torch.zeros_like(values[0][0]) if length else None
    return tuple(
        torch.stack([own[step] if step < len(own) else empty for own in values])  # type: ignore[misc]
        for step in range(length)
    )

"""The decode loop, which drafts, verifies, accepts and commits, the target model's passes, and the texts.

The texts of a batch may have different lengths. Their tokens are chosen as ``generate`` chooses them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import generation

from drafters.features import FeatureTap
from integrations.transformers.drafts import Context, Drafts, shallow
from integrations.transformers.tree_cache import TreeCache, Window
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


@dataclass(frozen=True)
class Prompts:
    """The prompts as ``generate`` has prepared them.

    input_ids, position_ids: [B, P] int64
    attention_mask: [B, P], 0 at the left padding; None where there is none
    max_length: of a text, its prompt included
    cache: an empty cache of Transformers
    window: of the model's layers, if texts may become longer than it
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    max_length: int
    cache: Any
    window: Window | None = None
    chunk_size: int | None = None


def decode(
    passes: "TargetPasses", drafts: Drafts, chooser: TokenChooser, prompts: Prompts, *, num_nodes: int
) -> tuple[list[Text], float]:
    """Continue the prompts until all texts have ended. num_nodes: drafts of a tree at most.

    Returns the new tokens for each verify pass too, which counts once for every text that had not ended.
    """
    input_ids, mask = prompts.input_ids, prompts.attention_mask
    is_text = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    texts = [Text(ids) for ids in input_ids.unsqueeze(1).unbind()]
    logits, features = passes.prefill(
        input_ids, mask, prompts.position_ids, prompts.cache, chunk_size=prompts.chunk_size
    )
    cache = TreeCache(prompts.cache, is_text, prompts.window)
    parts = zip(input_ids, features, is_text, strict=True)
    contexts = [Context(ids[own], block[own]) for ids, block, own in parts]
    # The last token of a prompt is in the cache already, so nothing is verified: the first token is chosen.
    chooser.walk(texts, [TokenTree.root(0)] * len(texts), logits.unsqueeze(1))

    start, num_steps = input_ids.shape[1], 0
    first_positions = prompts.position_ids[:, -1] + 1
    while not all(text.ended for text in texts):
        room = cache.room()
        size = num_nodes if room is None else min(num_nodes, room - 1)
        roots = [None if text.ended else int(text.ids[0, -1]) for text in texts]
        trees = drafts.propose(contexts, roots, size)
        # A node after which no token can follow is of no use, and the model may have no position for it.
        lengths = [text.ids.shape[1] for text in texts]
        trees = [
            shallow(tree, max(prompts.max_length - 1 - length, 0))
            for tree, length in zip(trees, lengths, strict=True)
        ]

        written = torch.tensor([length - 1 - start for length in lengths], device=input_ids.device)
        logits, features = passes.verify(trees, cache, first_positions + written)
        num_steps += sum(not text.ended for text in texts)
        paths = chooser.walk(texts, trees, logits)

        cache.commit(paths, [not text.ended for text in texts])
        contexts = _accepted(trees, paths, features)
    # The first token of every text came before all verify passes.
    num_tokens = sum(text.ids.shape[1] - start - 1 for text in texts)
    return texts, num_tokens / max(num_steps, 1)


def _accepted(trees: Sequence[TokenTree], paths: Sequence[Any], features: Tensor) -> list[Context]:
    """The tokens and features of the accepted nodes, which are the next context."""
    found = []
    for index, (tree, path) in enumerate(zip(trees, paths, strict=True)):
        nodes = torch.from_numpy(path).to(features.device)
        tokens = torch.from_numpy(tree.tokens[path]).to(features.device)
        found.append(Context(tokens, features[index, nodes]))
    return found


class TargetPasses:
    """A causal LM of Transformers with the features of some of its layers. Ends with its ``with`` block."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...]):
        self._model = model
        self._tap = FeatureTap(model, layer_ids)
        # Logits of a prompt's other tokens are not needed, and may be larger than the model.
        keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if keeps_last else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tap.remove()

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,
        *,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read prompts [B, P], left-padded as ``attention_mask`` says, into an empty cache.

        Returns the last tokens' logits [B, V] and the features [B, P, F*H].
        """
        length = input_ids.shape[1]
        features = []
        for start in range(0, length, chunk_size or length):
            end = min(start + (chunk_size or length), length)
            output = self._model(
                input_ids=input_ids[:, start:end],
                attention_mask=None if attention_mask is None else attention_mask[:, :end],
                position_ids=position_ids[:, start:end],
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **self._last_only,
            )
            features.append(self._tap.take())
        return output.logits[:, -1], torch.cat(features, dim=1)

    def verify(
        self, trees: Sequence[TokenTree], cache: TreeCache, root_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass over a tree for each sequence, padded to the largest.

        root_positions: [B] int64, the positions of the trees' roots
        Returns logits [B, M, V] and features [B, M, F*H] of every node.
        """
        size = max(map(len, trees))
        tokens = np.zeros((2, len(trees), size), np.int64)
        for index, tree in enumerate(trees):
            tokens[0, index, : len(tree)] = tree.tokens
            tokens[1, index, : len(tree)] = tree.depths
        token_ids, depths = torch.from_numpy(tokens).to(self._model.device)
        output = self._model(
            input_ids=token_ids,
            attention_mask=cache.mask(trees, self._model.dtype),
            position_ids=root_positions.unsqueeze(1) + depths,
            past_key_values=cache.cache,
            use_cache=True,
            return_dict=True,
        )
        return output.logits, self._tap.take()

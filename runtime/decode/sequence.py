"""One text while it is decoded: where it stands, how its tokens are chosen, what text they make."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import RequestError
from runtime.decode.acceptance import Acceptor, GreedyAcceptor, Sampler, TokenScore
from runtime.decode.grammar import Grammar, GrammarCompiler, GrammarState
from runtime.decode.prefix_cache import block_keys
from runtime.decode.sampling_params import GREEDY, SamplingParams, require
from runtime.text import Detokenizer, PromptTokenizer


@dataclass(frozen=True)
class Piece:
    """One token of the output: its text (possibly empty) and whether the draft head proposed it.

    log_prob, top: as of ``TokenScore``, where ``SamplingParams`` ask for them
    """

    token_id: int
    text: str
    drafted: bool
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """What one step added. ``finish_reason`` is ``stop`` or ``length`` on the last chunk only.

    prompt: the prompt's tokens with their scores, in the first chunk of a sequence that asks for them. The
        first token has none.
    error: why the text could not go on as its grammar wants, on the last chunk
    num_drafts: draft tokens that the step verified for the sequence
    num_cached: tokens of the prompt that were not read because their keys and values had been kept, in the
        first chunk; chunks with the same tokens are equal without it
    """

    pieces: tuple[Piece, ...]
    finish_reason: str | None
    prompt: tuple[Piece, ...] = ()
    error: RequestError | None = None
    num_drafts: int = 0
    num_cached: int = field(default=0, compare=False)

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
    prompt_scores: those of the prompt's tokens from the second on, as far as it has been read; None where
        nobody wants them, and no ``prompt_detokenizer`` makes the texts of its tokens
    num_top: the most probable tokens that are reported with every score
    grammar: where the text stands in its grammar, which the acceptor moves on; None without one
    num_cached: as of ``Chunk``
    """

    def __init__(
        self,
        prompt: NDArray[np.int64],
        *,
        max_new_tokens: int,
        stop_token_ids: frozenset[int],
        detokenizer: Detokenizer,
        acceptor: Acceptor,
        prompt_detokenizer: Detokenizer | None = None,
        num_top: int = 0,
        grammar: GrammarState | None = None,
    ):
        self.prompt = prompt
        self.prompt_scores: list[TokenScore] | None = None if prompt_detokenizer is None else []
        self.num_top = num_top
        self._prompt_detokenizer = prompt_detokenizer
        self.acceptor = acceptor
        self.grammar = grammar
        self.num_cached = 0
        self.length = 0
        self.last_token = -1
        self._output: list[int] = []
        self._remaining = max_new_tokens
        self._stop_token_ids = stop_token_ids
        self._detokenizer = detokenizer

    @cached_property
    def prompt_keys(self) -> list[bytes]:
        """Of the prompt's blocks (``runtime.decode.prefix_cache``)."""
        return block_keys(self.prompt)

    @property
    def cached_tokens(self) -> NDArray[np.int64]:
        """The tokens in the key/value cache, [length] at most."""
        return np.append(self.prompt, np.array(self._output, np.int64))[: self.length]

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that have not been read."""
        return max(0, self.prompt.size - self.length)

    def append(self, token_ids: Sequence[int], scores: Sequence[TokenScore], num_drafts: int = 0) -> Chunk:
        """Take a step's tokens, of which all but the last were drafted, and return their text.

        The chunk ends at a stop token, at a stop string or at the last token wanted, and an error of the
        grammar before that ends the text too. A stop token has no text.
        """
        is_first, self.last_token = self.last_token == -1, token_ids[-1]
        num_cached = self.num_cached if is_first else 0
        self._output += token_ids
        prompt = self._scored_prompt() if is_first else ()
        if not self._remaining:
            return Chunk((), "length", prompt, num_drafts=num_drafts, num_cached=num_cached)
        pieces: list[Piece] = []
        finish_reason = None
        for index, token_id in enumerate(token_ids):
            is_stop = token_id in self._stop_token_ids
            text = "" if is_stop else self._detokenizer.push(token_id)
            drafted = index < len(token_ids) - 1
            score = (scores[index].log_prob, scores[index].top) if scores else ()
            pieces.append(Piece(token_id, text, drafted, *score))
            if self._detokenizer.stopped or is_stop:
                finish_reason = "stop"
            elif len(pieces) == self._remaining:
                finish_reason = "length"
            if finish_reason:
                pieces[-1] = replace(pieces[-1], text=pieces[-1].text + self._detokenizer.flush())
                break
        self._remaining -= len(pieces)
        error = None
        # A step may fail behind the end of a text, where plain decoding does not come.
        num_tokens = len(self._output) - len(token_ids) + len(pieces)
        if self.grammar is not None and self.grammar.num_taken < num_tokens:
            error = self.grammar.failure
        if error is not None:
            finish_reason = finish_reason or "stop"
        return Chunk(tuple(pieces), finish_reason, prompt, error, num_drafts, num_cached)

    def _scored_prompt(self) -> tuple[Piece, ...]:
        """The tokens of the prompt, which has been read; empty where nobody wants them."""
        if self.prompt_scores is None or self._prompt_detokenizer is None:
            return ()
        texts = [self._prompt_detokenizer.push(token) for token in self.prompt.tolist()]
        texts[-1] += self._prompt_detokenizer.flush()
        first, *rest = [
            Piece(token, text, False) for token, text in zip(self.prompt.tolist(), texts, strict=True)
        ]
        scored = zip(rest, self.prompt_scores, strict=True)
        return (first, *(replace(piece, log_prob=score.log_prob, top=score.top) for piece, score in scored))


# Every stop string is searched for after every token, so their number and length are bounded.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 32, 256


class SequenceFactory:
    """Makes sequences for one model.

    max_length: positions that a prompt and its output may have together
    eos_token_ids: stop tokens where a request names none
    """

    def __init__(
        self,
        prompt_tokenizer: PromptTokenizer,
        *,
        vocab_size: int,
        max_length: int,
        eos_token_ids: Sequence[int],
    ):
        self.prompt_tokenizer = prompt_tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.grammars = GrammarCompiler(prompt_tokenizer.tokenizer, vocab_size, self.eos_token_ids)

    def make(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        prompt_log_probs: bool = False,
        grammar: Grammar | None = None,
    ) -> SequenceState:
        """A sequence for a request that has been checked.

        stop_token_ids: defaults to the model's end-of-text tokens. The stop token is part of the output's
            tokens, not of its text. Likewise a stop string is not part of the text, but the tokens that spell
            it are among the output's.
        prompt_log_probs: score the prompt's tokens, too; then ``max_new_tokens`` may be 0
        grammar: what the output has to be. A stop token may come exactly where the grammar may end. An
            output that ends earlier, at ``max_new_tokens`` or a stop string, is the beginning of one.
        Raises RequestError for an option that cannot be served.
        """
        prompt = self._check_prompt(prompt_ids, max_new_tokens, 0 if prompt_log_probs else 1)
        check_stop_strings(stop_strings)
        stops = frozenset(self.eos_token_ids if stop_token_ids is None else stop_token_ids)
        state = None if grammar is None else self.grammars.start(grammar, stops)
        is_argmax = sampling.is_argmax and state is None
        return SequenceState(
            prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops,
            detokenizer=Detokenizer(self.prompt_tokenizer.tokenizer, prompt_ids, stop_strings),
            acceptor=GreedyAcceptor() if is_argmax else Sampler(sampling, prompt_ids, self.vocab_size, state),
            prompt_detokenizer=Detokenizer(self.prompt_tokenizer.tokenizer, [], ())
            if prompt_log_probs
            else None,
            num_top=sampling.top_log_probs,
            grammar=state,
        )

    def _check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int, least: int) -> NDArray[np.int64]:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or prompt.size == 0:
            raise RequestError("must not be empty", field="prompt")
        require(max_new_tokens >= least, "max_new_tokens", f"at least {least}", max_new_tokens)
        bad = np.flatnonzero((prompt < 0) | (prompt >= self.vocab_size))
        if bad.size:
            problem = f"token ids must be below {self.vocab_size}, got {prompt[bad[0]]} at index {bad[0]}"
            raise RequestError(problem, field="prompt")
        longest, size = self.max_length, prompt.size
        require(size < longest, "prompt", f"shorter than the context of {longest} tokens", size)
        expected = f"at most {longest - size} after a prompt of {size} tokens (the context is {longest})"
        require(size + max_new_tokens <= longest, "max_new_tokens", expected, max_new_tokens)
        return prompt


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raises RequestError for an empty or a long one, for too many, and for one that is not in a list."""
    longest, problem = max(map(len, stop_strings), default=0), None
    if isinstance(stop_strings, str):
        problem = f"must be a list of texts, got {stop_strings!r}"
    elif "" in stop_strings:
        problem = "must not hold an empty string"
    elif len(stop_strings) > MAX_STOP_STRINGS:
        problem = f"must be at most {MAX_STOP_STRINGS}, got {len(stop_strings)}"
    elif longest > MAX_STOP_LENGTH:
        problem = f"must have at most {MAX_STOP_LENGTH} characters each, got {longest}"
    if problem:
        raise RequestError(problem, field="stop_strings")

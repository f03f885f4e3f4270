"""Requests: checks a prompt and its options and makes the sequence that a batch decodes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import RequestError
from runtime.decode.acceptance import GreedyAcceptor
from runtime.decode.sampling import Sampler
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import SequenceState
from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenization import PromptTokenizer

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

    def make(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
    ) -> SequenceState:
        """A sequence for a request that has been checked.

        stop_token_ids: defaults to the model's end-of-text tokens. The stop token is part of the output's
            tokens, not of its text. Likewise a stop string is not part of the text, but the tokens that spell
            it are among the output's.
        Raises RequestError for an option that cannot be served.
        """
        prompt = self._check_prompt(prompt_ids, max_new_tokens)
        check_stop_strings(stop_strings)
        return SequenceState(
            prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(self.eos_token_ids if stop_token_ids is None else stop_token_ids),
            detokenizer=Detokenizer(self.prompt_tokenizer.tokenizer, prompt_ids, stop_strings),
            acceptor=GreedyAcceptor()
            if sampling.is_argmax
            else Sampler(sampling, prompt_ids, self.vocab_size),
        )

    def _check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> NDArray[np.int64]:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or prompt.size == 0:
            raise RequestError("prompt: must not be empty")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        bad = np.flatnonzero((prompt < 0) | (prompt >= self.vocab_size))
        if bad.size:
            raise RequestError(
                f"prompt: token ids must be below {self.vocab_size}, got {prompt[bad[0]]} at index {bad[0]}"
            )
        if prompt.size >= self.max_length:
            raise RequestError(
                f"prompt: must be shorter than the context of {self.max_length} tokens, got {prompt.size}"
            )
        if prompt.size + max_new_tokens > self.max_length:
            raise RequestError(
                f"max_new_tokens: must be at most {self.max_length - prompt.size} after a prompt of "
                f"{prompt.size} tokens (the context is {self.max_length}), got {max_new_tokens}"
            )
        return prompt


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raises RequestError for an empty or a long one, and for too many."""
    if "" in stop_strings:
        raise RequestError("stop_strings: must not hold an empty string")
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop_strings: must be at most {MAX_STOP_STRINGS}, got {len(stop_strings)}")
    longest = max(map(len, stop_strings), default=0)
    if longest > MAX_STOP_LENGTH:
        raise RequestError(
            f"stop_strings: must have at most {MAX_STOP_LENGTH} characters each, got {longest}"
        )

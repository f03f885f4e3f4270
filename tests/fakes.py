"""Fakes of everything around the decode loop, so that its tests need no torch, no graphs and no files.

    decoder = FakeDecoder(max_num_seqs=4)
    chunks = chunks_of(decoder, [7, 8], 20)
    assert token_ids(chunks) == LANGUAGE.continuation([7, 8], 20)

The engines are in ``tests.fake_engines``, those of draft heads in ``tests.fake_heads``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.core.token_tree import ROOT_PARENT, TokenTree
from runtime.decode.batch import Batch
from runtime.decode.budget import FixedBudget, NodeBudget
from runtime.decode.proposers.base import Proposer, swap_entries
from runtime.decode.sequence import Chunk, SequenceFactory
from runtime.decode.step import HostStep
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder
from runtime.engines.protocol import Features
from runtime.engines.recorder import Recorder
from runtime.text import PromptTokenizer
from tests.fake_engines import LANGUAGE, MAX_LENGTH, VOCAB_SIZE, FakeLanguage, FakeTargetEngine

# Options of ``SamplingParams`` that use every filter.
SAMPLING_SETTINGS: dict[str, dict[str, Any]] = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 2.0, "min_p": 0.3},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "bias": {"temperature": 1.0, "logit_bias": {1: 2.0, 4: -3.0}},
    "all": {
        "temperature": 0.9,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "logit_bias": {0: 1.0},
    },
    "penalised argmax": {"repetition_penalty": 1.5, "presence_penalty": 1.0},
}
# From the text so far to what comes next, of any length.
Truth = Callable[[list[int]], Sequence[int]]


def greedy_truth(text: list[int]) -> list[int]:
    return LANGUAGE.continuation(text, 5)


def known_texts(texts: Sequence[Sequence[int]]) -> Truth:
    """What follows in the first of some texts that begin with the text so far; nothing where none does."""

    def truth(text: list[int]) -> Sequence[int]:
        return next((known[len(text) :] for known in texts if list(known[: len(text)]) == text), ())

    return truth


class OracleProposer(Proposer):
    """Drafts the true continuation, for a few tokens, among wrong branches; now and then nothing true.

    The wrong branches go on with what is true after the right one, so that a node that is accepted in spite
    of its parent changes the text. The proposer checks the features that it is given.
    language: whose features they must be; None does not look at them
    contexts: for every slot, the tokens that it was told of
    ended: the contexts of slots that were released
    """

    def __init__(
        self,
        truth: Truth = greedy_truth,
        *,
        max_num_seqs: int = 1,
        language: FakeLanguage | None = LANGUAGE,
        seed: int = 0,
    ):
        self.contexts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.ended: list[list[int]] = []
        self._truth = truth
        self._language = language
        self._random = np.random.default_rng(seed)

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        for slot, tokens, block in zip(slots, token_ids, features.to_host(), strict=True):
            for token, feature in zip(tokens.tolist(), block, strict=True):
                context = self.contexts[slot]
                context.append(token)
                if self._language is not None:
                    expected = self._language.feature(self._language.state(context), len(context) - 1)
                    assert np.array_equal(feature, expected), f"not the feature of token {len(context) - 1}"

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        recorder.mark("draft")
        return [self._tree(slot, token).first(num_nodes) for slot, token in enumerate(last_tokens)]

    def swap(self, first: int, second: int) -> None:
        swap_entries(self.contexts, first, second)

    def load_context(
        self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[NDArray[np.float32]]
    ) -> None:
        self.contexts[slot] = tokens.tolist()

    def release(self, slot: int) -> None:
        if self.contexts[slot]:
            self.ended.append(self.contexts[slot])
            self.contexts[slot] = []

    def _tree(self, slot: int, root: int) -> TokenTree:
        random, drafts, right = self._random, list[tuple[int, int]](), 0
        wrong: list[int] = []
        for true in self._truth([*self.contexts[slot], root])[: random.integers(0, 6)]:
            tokens = [true, *(int(token) for token in (true + random.integers(1, 200, 2)) % 200)]
            random.shuffle(tokens)
            first = len(drafts) + 1
            drafts += [(right, token) for token in tokens]
            drafts += [(node, true) for node in wrong[:1]]
            right = first + tokens.index(true)
            wrong = [first + index for index in range(3) if first + index != right]
        return make_tree(root, drafts or [(0, int(random.integers(0, 200)))])


def make_tree(
    root: int, drafts: Sequence[tuple[int, int]], log_probs: Sequence[float] | None = None
) -> TokenTree:
    """drafts: (parent, token) of every node after the root"""
    depths = [0]
    for parent, _ in drafts:
        depths.append(depths[parent] + 1)
    return TokenTree(
        np.array([root, *(token for _, token in drafts)], np.int64),
        np.array([ROOT_PARENT, *(parent for parent, _ in drafts)], np.int64),
        np.array(depths, np.int64),
        -0.1 * np.arange(len(depths)) if log_probs is None else np.array([0.0, *log_probs]),
    )


class FakePromptTokenizer(PromptTokenizer):
    """A token for every byte, and no chat template."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.prefix = self.suffix = ""
        self._longest_token = 1


class FakeDecoder(SpeculativeDecoder):
    """A decoder on fakes, with its parts at hand.

    proposer: an ``OracleProposer`` of greedy texts by default
    """

    def __init__(
        self,
        proposer: Proposer | None = None,
        *,
        max_num_seqs: int = 1,
        num_nodes: int = 8,
        buckets: Mapping[str, Sequence[int]] | None = None,
        prefill_chunk_size: int = MAX_LENGTH,
        new_budget: Callable[[], NodeBudget] | None = None,
    ):
        self.engine = FakeTargetEngine(max_num_seqs=max_num_seqs, buckets=buckets)
        self.runner = HostStep(
            TargetModel(self.engine, prefill_chunk_size=prefill_chunk_size),
            OracleProposer(max_num_seqs=max_num_seqs) if proposer is None else proposer,
            max_num_seqs=max_num_seqs,
        )
        sequences = SequenceFactory(
            FakePromptTokenizer(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH, eos_token_ids=(0,)
        )
        super().__init__(Batch(self.runner), sequences, new_budget or partial(FixedBudget, num_nodes))


def chunks_of(decoder: SpeculativeDecoder, prompt: Sequence[int], count: int, **options: Any) -> list[Chunk]:
    """A stream's chunks; nothing but ``count`` ends it unless ``options`` say so."""
    return list(decoder.stream(prompt, **{"max_new_tokens": count, "stop_token_ids": (), **options}))


def token_ids(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]

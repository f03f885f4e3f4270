"""Prompts that begin as earlier texts do: what is kept of those changes no token and no draft."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import DeviceMemoryError
from runtime.decode.prefix_cache import BLOCK_SIZE, PrefixCache, block_keys
from runtime.decode.proposers.base import NoProposer
from runtime.decode.proposers.lookup import LookupProposer
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.step import HostStep
from runtime.decoder import SpeculativeDecoder
from runtime.device.block_store import BlockStore
from runtime.device.device import DeviceArray, HostDevice
from runtime.serve.scheduler import Scheduler
from tests.batch_runs import GenerateArguments, decode_together
from tests.fake_engines import LANGUAGE
from tests.fakes import FakeDecoder, OracleProposer, chunks_of, token_ids
from tests.runtime.decode.test_batch import HEADS, MAKE_PROPOSER

NUM_TURNS = 4
MUCH = 2**30
# All begin alike, and the last two for more than a block.
QUESTIONS = [[5, *range(60, 60 + 9 * index)] for index in (2, 3, 4)] + [[5, *range(60, 90), 7, 7]]


class Conversations:
    """Conversations whose turns are decoded together; a prompt is all of the turns before and a question."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = [[] for _ in QUESTIONS]
        # Tokens of the prompts so far that were in a cache when the turn before had ended.
        self.num_known = 0

    def requests(self, turn: int) -> list[GenerateArguments]:
        found: list[GenerateArguments] = []
        for index, (text, question) in enumerate(zip(self.texts, QUESTIONS, strict=True)):
            self.num_known += max(0, (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE - 1)
            text += [token + turn for token in question]
            sampling = SamplingParams(temperature=0.8, seed=index) if index % 2 else GREEDY
            options = {"max_new_tokens": 11 + 9 * index, "stop_token_ids": (), "sampling": sampling}
            found.append((list(text), options))
        return found

    def add(self, answers: Sequence[Sequence[int]]) -> None:
        for text, answer in zip(self.texts, answers, strict=True):
            text += answer


def converse(decoder: SpeculativeDecoder, seed: int = 0) -> int:
    """Whole conversations on fakes, with every answer checked; returns the tokens that may be reused."""
    conversations = Conversations()
    for turn in range(NUM_TURNS):
        requests = conversations.requests(turn)
        expected = [
            LANGUAGE.continuation(prompt, options["max_new_tokens"], options["sampling"])
            for prompt, options in requests
        ]
        assert decode_together(decoder, requests, np.random.default_rng(seed + turn)) == expected
        conversations.add(expected)
    return conversations.num_known


def fake_decoder(proposer: str = "plain", max_bytes: int = MUCH) -> tuple[FakeDecoder, PrefixCache]:
    decoder = FakeDecoder(MAKE_PROPOSER[proposer](), max_num_seqs=4)
    decoder.batch.prefixes = PrefixCache(max_bytes)
    return decoder, decoder.batch.prefixes


@pytest.mark.parametrize("proposer", MAKE_PROPOSER)
def test_conversations_give_the_same_tokens(proposer: str) -> None:
    decoder, prefixes = fake_decoder(proposer)
    num_known = converse(decoder)
    assert prefixes.num_hit_tokens >= num_known > 800


def test_the_context_of_the_head_is_whole() -> None:
    """The oracle knows the features of all tokens before."""
    oracle = OracleProposer(max_num_seqs=4)
    decoder = FakeDecoder(oracle, max_num_seqs=4)
    decoder.batch.prefixes = PrefixCache(MUCH)
    converse(decoder)
    assert max(map(len, oracle.ended)) > 150


@pytest.mark.parametrize("proposer", [*HEADS, "lookup"])
def test_drafts_are_the_same(proposer: str) -> None:
    """Not only the text: what is kept for the head is what it would have read."""
    found = []
    for max_bytes in (MUCH, 0):
        made = LookupProposer(NoProposer(), 1) if proposer == "lookup" else MAKE_PROPOSER[proposer]()
        decoder = FakeDecoder(made)
        decoder.batch.prefixes = PrefixCache(max_bytes)
        text, steps = [5], []
        for turn in range(NUM_TURNS):
            # Its end is the beginning of another text, too.
            for ending in ([70, 71 + turn], list(range(80, 80 + BLOCK_SIZE + turn))):
                chunks = chunks_of(decoder, text + ending, 20)
                steps += [chunk.token_ids for chunk in chunks]
                answer = token_ids(chunks)
            text += ending + answer
        found.append(steps)
    assert found[0] == found[1]
    assert max(map(len, found[0])) > 1 or proposer == "lookup"


@pytest.mark.parametrize("max_bytes", [0, 700, 9_000])
def test_a_small_store_forgets(max_bytes: int) -> None:
    """A block of the fakes has 640 bytes."""
    decoder, prefixes = fake_decoder("parallel", max_bytes)
    num_known = converse(decoder)
    assert prefixes.num_bytes <= max_bytes
    assert prefixes.num_hit_tokens < num_known
    assert (prefixes.num_hit_tokens > 0) == (max_bytes > 0)


def test_the_blocks_used_last_stay() -> None:
    """First blocks outlive those that need them, and a text too long for the store keeps its beginning."""
    decoder, prefixes = fake_decoder(max_bytes=6 * BLOCK_SIZE * 2 * 2 * 4)
    first, second, third = ([token] * (4 * BLOCK_SIZE) for token in (5, 6, 7))

    def num_known(text: list[int]) -> int:
        return prefixes.num_known(block_keys(np.array(text)))

    chunks_of(decoder, first, 2)
    assert [num_known(text) for text in (first, second)] == [4, 0]
    chunks_of(decoder, second, 2)
    assert [num_known(text) for text in (first, second)] == [2, 4]
    chunks_of(decoder, first, 2)
    assert [num_known(text) for text in (first, second)] == [4, 2]
    chunks_of(decoder, third * 3, 2)
    assert [num_known(text) for text in (first, second, third * 3)] == [0, 0, 6]


def test_prompts_of_running_requests_are_known() -> None:
    decoder, prefixes = fake_decoder()
    prompt = list(range(20, 20 + 3 * BLOCK_SIZE + 4))
    with Scheduler(decoder) as scheduler:
        first = scheduler.stream(prompt, max_new_tokens=300, stop_token_ids=())
        while not prefixes.num_bytes:
            next(first)
        chunks = list(scheduler.stream([*prompt, 9], max_new_tokens=5, stop_token_ids=()))
        assert token_ids(chunks) == LANGUAGE.continuation([*prompt, 9], 5)
        assert scheduler.num_prefix_hit_tokens == 3 * BLOCK_SIZE - 1
        assert [chunk.num_cached for chunk in chunks] == [3 * BLOCK_SIZE - 1, *[0] * (len(chunks) - 1)]


def test_scored_prompts_are_read() -> None:
    decoder, prefixes = fake_decoder()
    prompt = list(range(20, 60))
    fresh = chunks_of(decoder, prompt, 3, prompt_log_probs=True)
    assert chunks_of(decoder, prompt, 3, prompt_log_probs=True) == fresh
    assert prefixes.num_hit_tokens == 0
    assert chunks_of(decoder, prompt, 3)[0].token_ids == fresh[0].token_ids
    assert prefixes.num_hit_tokens == 2 * BLOCK_SIZE - 1


@pytest.mark.parametrize(
    ("fault", "replacement"),
    [
        ("runtime.engines.kv_cache.SlabKVCache.write", lambda *args: None),
        ("runtime.decode.proposers.base.HeadSlots.load_context", lambda *args: None),
    ],
    ids=["nothing is written", "the head is not told"],
)
def test_a_fault_is_noticed(
    fault: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, replacement)
    decoder, _ = fake_decoder("parallel")
    expected = [chunks_of(FakeDecoder(MAKE_PROPOSER["parallel"]()), prompt, 20) for prompt in ALIKE]
    try:
        found = [chunks_of(decoder, prompt, 20) for prompt in ALIKE]
    except AssertionError:
        return  # the fakes check their inputs
    assert found != expected


# The same block after two different ones, and the second text again.
ALIKE = [[5, *range(first, first + BLOCK_SIZE - 1), *range(90, 92 + BLOCK_SIZE)] for first in (20, 40, 40)]


def keys_of_blocks_alone(tokens: Any) -> list[bytes]:
    starts = range(0, tokens.size - BLOCK_SIZE + 1, BLOCK_SIZE)
    return [block_keys(tokens[start : start + BLOCK_SIZE])[0] for start in starts]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_block_follows_the_tokens_before_it(
    tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    """Keys of a block's own tokens would take keys and values of another text, which a real model notices."""
    if not is_right:
        monkeypatch.setattr("runtime.decode.batch.block_keys", keys_of_blocks_alone)
        monkeypatch.setattr("runtime.decode.sequence.block_keys", keys_of_blocks_alone)
    fresh, reusing = (
        SpeculativeDecoder.from_bundle(
            tiny_bundle_dir, num_threads=1, num_nodes=8, prefix_cache_mb=prefix_cache_mb, verify=False
        )
        for prefix_cache_mb in (0, 64)
    )
    found = [
        [chunks_of(decoder, prompt, 4, sampling=SamplingParams(log_probs=True)) for prompt in ALIKE]
        for decoder in (fresh, reusing)
    ]
    assert (found[0] == found[1]) == is_right


# Heads whose trunks keep their context differently.
TRUNKS = ("ctc-mlp", "ctc-residual", "block", "dspark", "dflash")


@pytest.mark.parametrize("name", TRUNKS)
def test_the_bits_are_the_same(
    name: str, trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]
) -> None:
    """Tokens and log-probabilities of conversations on a real model, with every trunk."""
    found = []
    for prefix_cache_mb in (0, 64):
        decoder = SpeculativeDecoder.from_bundle(
            make_tiny_bundle(trained_heads_dir / name),
            max_num_seqs=3,
            num_threads=1,
            num_nodes=8,
            prefix_cache_mb=prefix_cache_mb,
            verify=False,
        )
        assert isinstance(decoder.batch.runner, HostStep)
        assert decoder.batch.runner.target_model.key_block is not None
        turns = []
        conversations = Conversations()
        with Scheduler(decoder) as scheduler:
            for turn in range(3):
                streams = []
                for prompt, options in conversations.requests(turn):
                    sampling = SamplingParams(
                        temperature=options["sampling"].temperature, seed=1, log_probs=True
                    )
                    streams.append(scheduler.stream(prompt, **{**options, "sampling": sampling}))
                answers = [[piece for chunk in stream for piece in chunk.pieces] for stream in streams]
                conversations.add([[piece.token_id for piece in answer] for answer in answers])
                turns.append([[(piece.token_id, piece.log_prob) for piece in answer] for answer in answers])
            hits = scheduler.num_prefix_hit_tokens
        assert hits >= conversations.num_known if prefix_cache_mb else hits == 0
        found.append(turns)
    assert found[0] == found[1]


@pytest.mark.parametrize("head", ["ctc", "eagle"])
def test_steps_on_a_device(
    head: str,
    tiny_step_bundle: Path,
    level_bundle_of: Callable[[str], Path],
) -> None:
    """Tokens of conversations are those of the host, and drafts those of whole prompts."""

    def load(**options: Any) -> SpeculativeDecoder:
        bundle = tiny_step_bundle if head == "ctc" else level_bundle_of(head)
        return SpeculativeDecoder.from_bundle(
            bundle, **{"num_threads": 1, "num_nodes": 8, "verify": False, **options}
        )

    plain = load(method="plain", step="host")
    decoder = load(step="graph", max_num_seqs=3, prefix_cache_mb=1)
    assert decoder.batch.prefixes is not None
    num_bytes = decoder.batch.prefixes.max_bytes
    assert num_bytes <= 2**20
    # The texts are the same whatever is kept.
    answers: list[list[list[int]]] = []
    for share in (1, 8):
        prefixes = decoder.batch.prefixes = PrefixCache(num_bytes // share)
        conversations = Conversations()
        for turn in range(NUM_TURNS):
            requests = conversations.requests(turn)
            if len(answers) == turn:
                answers.append([token_ids(list(plain.stream(prompt, **each))) for prompt, each in requests])
            assert decode_together(decoder, requests, np.random.default_rng(turn)) == answers[turn]
            conversations.add(answers[turn])
        assert prefixes.num_bytes <= prefixes.max_bytes
        # The head may be a step behind when a text ends.
        most = conversations.num_known - len(QUESTIONS) * NUM_TURNS * BLOCK_SIZE
        assert (prefixes.num_hit_tokens >= most) == (share == 1)
    text = conversations.texts[0]
    fresh = load(step="graph")
    steps = [
        [chunk.token_ids for chunk in chunks_of(each, [*text, *range(20, 30)], 24)]
        for each in (decoder, fresh)
    ]
    assert steps[0] == steps[1]


def test_memory_that_holds_no_text() -> None:
    device = HostDevice()
    cache = device.allocate((2, 4, 64, 8), "float32")
    size = cache.rows(0, 1).nbytes
    assert [BlockStore(device, [cache], [cache], most).num_bytes for most in (0, 2 * size - 1)] == [0, 0]
    # All but the place for a block that is copied before an old one goes.
    assert BlockStore(device, [cache], [cache], 4 * size).num_bytes == 4 * size * 7 // 8


def test_a_host_without_memory_for_prefixes_decodes_without_them(
    tiny_step_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runtime.decoder.MAX_PREFIX_CACHE_MB", 2**40)
    options: dict[str, Any] = {"num_threads": 1, "num_nodes": 8, "verify": False, "step": "graph"}
    decoder = SpeculativeDecoder.from_bundle(tiny_step_bundle, **options, prefix_cache_mb=2**36)
    assert decoder.batch.prefixes is None
    assert re.search(r"no memory for prefixes: cpu: .*; smaller max_length, ", caplog.text)


def test_memory_that_is_lacking_for_the_last_layer() -> None:
    """What a device has given stays taken until it is closed, so it gives all or nothing."""
    device = HostDevice()
    caches = [device.allocate((2, 4, 64, 8), "float32") for _ in range(3)]
    given: list[int] = []

    def allocate(shape: Sequence[int], dtype: str) -> DeviceArray:
        array = DeviceArray(0, tuple(shape), dtype)
        if sum(given) + array.nbytes > 2 * caches[0].nbytes:
            raise DeviceMemoryError("no memory is left")
        given.append(array.nbytes)
        return array

    device.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises(DeviceMemoryError):
        BlockStore(device, caches, [], 3 * caches[0].nbytes)
    assert not given

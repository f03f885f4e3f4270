"""Requests from many threads: each gets its own text, leaves no trace, and nobody waits for ever."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.core.errors import DeviceError, RequestError
from runtime.decode.budget import AdaptiveBudget
from runtime.decode.prefix_cache import PrefixCache
from runtime.decode.proposers.base import NoProposer
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Chunk, SequenceState
from runtime.decode.step import StepResult
from runtime.decode.step_costs import StepCosts
from runtime.decoder import DEFAULT_NUM_NODES, SpeculativeDecoder
from runtime.engines.kv_cache import SlabKVCache
from runtime.serve.request import CancelledError, RequestFailure, UnavailableError
from runtime.serve.scheduler import Scheduler, affordable_chunk
from tests.fake_engines import LANGUAGE
from tests.fakes import FakeDecoder, token_ids
from tests.runtime.decode.test_batch import MAKE_PROPOSER

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 150)
# Seconds until a test gives up waiting; nothing takes as long.
PATIENCE = 60


def options_of(index: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": 8 + 5 * (index % 7), "stop_token_ids": ()}
    if index % 4 == 1:
        options["sampling"] = SamplingParams(temperature=0.9, top_k=20, seed=index)
    if index % 4 == 2:
        options["stop_strings"] = ["e"]
    return options


@pytest.fixture
def make_scheduler() -> Iterator[Callable[..., Scheduler]]:
    started = []

    def make(decoder: FakeDecoder | None = None, **options: Any) -> Scheduler:
        scheduler = Scheduler(decoder or FakeDecoder(max_num_seqs=4), **options)
        started.append(scheduler)
        scheduler.start()
        return scheduler

    yield make
    for scheduler in started:
        scheduler.stop(drain=False)


def prompt_of(index: int) -> list[int]:
    return FakeDecoder().prompt_tokenizer.encode(PROMPTS[index % len(PROMPTS)])


def sequence_of(scheduler: Scheduler, prompt: list[int], count: int) -> SequenceState:
    return scheduler.decoder.new_sequence(prompt, max_new_tokens=count, stop_token_ids=())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


class Held:
    """A callback that stops the scheduler's thread at every call until it is let go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.events: list[Chunk | RequestFailure] = []
        self._permits = threading.Semaphore(0)
        self._is_free = False

    def __call__(self, event: Chunk | RequestFailure) -> None:
        self.events.append(event)
        self.reached.set()
        if not self._is_free:
            assert self._permits.acquire(timeout=PATIENCE)

    def allow(self, count: int) -> None:
        """Let the scheduler's thread return from so many calls."""
        self._permits.release(count)

    def go(self) -> None:
        """Stop at no call any more."""
        self._is_free = True
        self.allow(1)


def test_everybody_gets_their_own_text(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(prefill_chunk_size=16)
    count = 40
    found: dict[int, list[Chunk]] = {}

    def ask(index: int) -> None:
        time.sleep(0.01 * (index % 5))
        found[index] = list(scheduler.stream(prompt_of(index), **options_of(index)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == count
    plain = FakeDecoder(NoProposer())
    for index, chunks in found.items():
        expected = list(plain.stream(prompt_of(index), **options_of(index)))
        assert token_ids(chunks) == token_ids(expected)
        assert "".join(c.text for c in chunks) == "".join(c.text for c in expected)
        assert chunks[-1].finish_reason == expected[-1].finish_reason
    until(lambda: scheduler.num_running == 0)
    assert scheduler.decoder.batch.sequences == []
    assert scheduler.num_submitted == count


def test_a_cancelled_request_frees_its_slot_within_a_step(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()
    held = Held()
    request = scheduler.submit(sequence_of(scheduler, [5, 6], 400), held)
    other = scheduler.stream([7, 8], max_new_tokens=30, stop_token_ids=())
    assert held.reached.wait(PATIENCE)
    request.cancel()
    held.go()
    assert token_ids(list(other)) == LANGUAGE.continuation([7, 8], 30)
    until(lambda: scheduler.num_running == 0)
    assert len(held.events) == 1
    assert scheduler.decoder.batch.sequences == []
    # The prompt, and what the step in progress gave.
    assert request.sequence.length <= 2 + 1 + DEFAULT_NUM_NODES


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_closed_stream_is_cancelled(make_scheduler: Callable[..., Scheduler], has_begun: bool) -> None:
    scheduler = make_scheduler()
    held = Held()
    scheduler.submit(sequence_of(scheduler, [7], 400), held)
    assert held.reached.wait(PATIENCE)
    stream = scheduler.stream([5, 6], max_new_tokens=400, stop_token_ids=())
    request = stream._request
    if has_begun:
        # At most three steps while the stream is open: the other request stops each of them.
        held.allow(3)
        next(stream)
    stream.close()
    held.go()
    until(lambda: scheduler.num_running == scheduler.num_waiting == 0)
    assert scheduler.decoder.batch.sequences == []
    assert request.sequence.length <= (2 + 5 * (1 + DEFAULT_NUM_NODES) if has_begun else 0)
    assert list(stream) == []


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("chunk_ms", "step_ms", "chunks_between"),
    [(0.0, 0.0, 1), (5.0, 4.0, 1), (3.0, 10.0, 4)],
    ids=["a clock that stands still", "long chunks", "long steps"],
)
def test_a_long_prompt_does_not_stall_the_others(
    make_scheduler: Callable[..., Scheduler],
    monkeypatch: pytest.MonkeyPatch,
    chunk_ms: float,
    step_ms: float,
    chunks_between: int,
) -> None:
    """While it is read, in chunks for as long as a step takes, they decode; by a clock of the test's own."""
    clock = Clock()
    monkeypatch.setattr("runtime.serve.scheduler.time", clock)
    decoder = FakeDecoder(NoProposer(), max_num_seqs=2)
    order: list[str] = []
    compute = decoder.engine.compute

    def timed(forward: Any, inputs: Any, outputs: Any) -> None:
        is_step = inputs["input_ids"].shape[1] == 1
        clock.now += (step_ms if is_step else chunk_ms) / 1000
        order.append("step" if is_step else "chunk")
        compute(forward, inputs, outputs)

    monkeypatch.setattr(decoder.engine, "compute", timed)
    scheduler = make_scheduler(decoder, prefill_chunk_size=16)
    held, has_ended = Held(), threading.Event()
    scheduler.submit(sequence_of(scheduler, [5, 6], 400), held)
    assert held.reached.wait(PATIENCE)
    num_chunks = 30
    scheduler.submit(sequence_of(scheduler, [9] * 16 * num_chunks, 1), lambda event: has_ended.set())
    held.go()
    assert has_ended.wait(PATIENCE)
    expected = ["chunk"]
    for _ in range(0, num_chunks, chunks_between):
        expected += ["step", *["chunk"] * chunks_between]
    expected = expected[: len(expected) - -num_chunks % chunks_between]
    assert order[: len(expected)] == expected


CHUNK = 16
# Prompts of 30 chunks. Their texts differ, because their lengths do.
LONG_PROMPTS = [[9] * (30 * CHUNK - index) for index in range(4)]


class Chunks:
    """Counts a scheduler's chunks of prompts, and calls a function before one of them, in its thread.

    lengths: of the prompt of every chunk
    texts: of all requests, by prompt, and how many chunks there were before the first token
    """

    def __init__(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], None]]
    ):
        self.lengths: list[int] = []
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.firsts: dict[tuple[int, ...], int] = {}
        self._scheduler = scheduler
        runner = scheduler.decoder.batch.runner
        prefill = runner.prefill

        def counted(slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
            actions.get(len(self.lengths), lambda: None)()
            assert num_tokens <= CHUNK or len(scheduler._running) == 1
            self.lengths.append(sequence.prompt.size)
            return prefill(slot, sequence, num_tokens)

        monkeypatch.setattr(runner, "prefill", counted)

    def ask(
        self, prompt: list[int], count: int = 1, then: Callable[[], None] = lambda: None
    ) -> threading.Event:
        """Submit a request; the event is set when it has ended, after ``then`` was called."""
        key, ended = tuple(prompt), threading.Event()
        self.texts[key] = []

        def hear(event: Chunk | RequestFailure) -> None:
            assert isinstance(event, Chunk)
            self.firsts.setdefault(key, len(self.lengths))
            self.texts[key] += event.token_ids
            if event.finish_reason:
                then()
                ended.set()

        self._scheduler.submit(sequence_of(self._scheduler, prompt, count), hear)
        return ended

    def check_texts(self) -> None:
        for prompt, text in self.texts.items():
            assert text == LANGUAGE.continuation(prompt, len(text))


@pytest.mark.parametrize("num_long", [1, 2, 4])
@pytest.mark.parametrize("decodes", [False, True])
def test_a_short_prompt_waits_for_three_chunks_of_long_ones(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch, num_long: int, decodes: bool
) -> None:
    """Whenever it comes, and whether or not other requests decode meanwhile."""
    scheduler = make_scheduler(
        FakeDecoder(max_num_seqs=6, prefill_chunk_size=CHUNK), prefill_chunk_size=CHUNK
    )
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 400 if decodes else 1), held)
    assert held.reached.wait(PATIENCE)
    shorts = {4 + 5 * index: [7 + index, 3] for index in range(5)}
    ended: list[threading.Event] = []
    actions: dict[int, Callable[[], None]] = {}
    chunks = Chunks(scheduler, monkeypatch, actions)
    for place, short in shorts.items():
        actions[place] = lambda prompt=short: ended.append(chunks.ask(prompt))  # type: ignore[misc]
    ended += [chunks.ask(prompt, 9) for prompt in LONG_PROMPTS[:num_long]]
    held.go()
    until(lambda: len(ended) == num_long + len(shorts) and all(event.is_set() for event in ended))
    for place, prompt in shorts.items():
        # The chunk in progress, up to two of others, and its own.
        assert chunks.firsts[tuple(prompt)] - place <= 3 + 1
    chunks.check_texts()
    until(lambda: scheduler.num_running == 0)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_short_prompts_do_not_starve_a_long_one(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    """A new short one comes as soon as one has ended, so that two wait at all times."""
    scheduler = make_scheduler(
        FakeDecoder(max_num_seqs=max_num_seqs, prefill_chunk_size=CHUNK), prefill_chunk_size=CHUNK
    )
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 1), held)
    assert held.reached.wait(PATIENCE)
    chunks = Chunks(scheduler, monkeypatch, {})
    num_short = 0

    def ask_short() -> None:
        nonlocal num_short
        if not has_ended.is_set():
            num_short += 1
            chunks.ask([6, num_short % 250, num_short // 250], then=ask_short)

    has_ended = threading.Event()
    for _ in range(2):
        ask_short()
    chunks.ask(LONG_PROMPTS[0], then=has_ended.set)
    held.go()
    assert has_ended.wait(PATIENCE)
    until(lambda: scheduler.num_running == scheduler.num_waiting == 0)
    assert chunks.firsts[tuple(LONG_PROMPTS[0])] <= 30 * 4 + 4
    # In a single slot the long one is not interrupted.
    assert num_short > 30 or max_num_seqs == 1
    chunks.check_texts()


def test_too_many_tokens_in_the_queue_are_refused(make_scheduler: Callable[..., Scheduler]) -> None:
    """A prompt alone may have more than all that wait together, and others may have the same prompt."""
    scheduler = make_scheduler(max_queue_tokens=100)
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 9), held)
    assert held.reached.wait(PATIENCE)
    waiting = scheduler.stream([6] * 150, max_new_tokens=9, stop_token_ids=())
    message = "queue: 150 tokens of prompts wait to be read, with the 2 of this one they would be more than"
    with pytest.raises(UnavailableError, match=message):
        scheduler.stream([7, 8], max_new_tokens=9)
    other_choice = scheduler.stream([6] * 150, max_new_tokens=9, stop_token_ids=())
    held.go()
    for choice in (waiting, other_choice):
        assert token_ids(list(choice)) == LANGUAGE.continuation([6] * 150, 9)
    later = scheduler.stream([7, 8], max_new_tokens=9, stop_token_ids=())
    assert token_ids(list(later)) == LANGUAGE.continuation([7, 8], 9)


def test_a_full_queue_refuses_at_once(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(FakeDecoder(max_num_seqs=1), max_queue_size=3)
    waited: list[float] = []
    scheduler.on_admit = waited.append
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 9), held)
    assert held.reached.wait(PATIENCE)
    waiting = [scheduler.stream([6, index], max_new_tokens=9, stop_token_ids=()) for index in range(3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
    with pytest.raises(UnavailableError, match="queue: it is full with 3 requests"):
        scheduler.stream([7], max_new_tokens=9)
    held.go()
    for index, stream in enumerate(waiting):
        assert token_ids(list(stream)) == LANGUAGE.continuation([6, index], 9)
    assert len(waited) == 4
    assert min(waited[1:]) > 0


def test_a_burst_fills_the_free_slots_and_the_queue(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(FakeDecoder(max_num_seqs=4), max_queue_size=2)
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 9), held)
    assert held.reached.wait(PATIENCE)
    for index in range(3 + 2):
        scheduler.submit(sequence_of(scheduler, [6, index], 9), lambda event: None)
    with pytest.raises(UnavailableError, match="queue: it is full with 2 requests"):
        scheduler.stream([7], max_new_tokens=9)
    held.go()


def test_bad_requests_never_reach_the_queue(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="prompt: must not be empty"):
        scheduler.stream([], max_new_tokens=4)
    assert scheduler.num_waiting == scheduler.num_running == scheduler.num_submitted == 0


@pytest.mark.parametrize("drain", [True, False])
def test_draining_and_failing(make_scheduler: Callable[..., Scheduler], drain: bool) -> None:
    scheduler = make_scheduler()
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 9), held)
    assert held.reached.wait(PATIENCE)
    running = scheduler.stream([6, 7], max_new_tokens=20, stop_token_ids=())
    stopper = threading.Thread(target=scheduler.stop, kwargs={"drain": drain})
    stopper.start()
    until(lambda: scheduler._stopping)
    with pytest.raises(UnavailableError, match="shutting down"):
        scheduler.stream([7], max_new_tokens=9)
    held.go()
    if drain:
        assert token_ids(list(running)) == LANGUAGE.continuation([6, 7], 20)
    else:
        with pytest.raises(UnavailableError, match="shutting down"):
            list(running)
    stopper.join(PATIENCE)
    assert not stopper.is_alive()


def test_a_failing_step_fails_the_running_and_serves_the_next(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = FakeDecoder(max_num_seqs=4)
    scheduler = make_scheduler(decoder)
    with monkeypatch.context() as patch:

        def fail(*args: Any, **options: Any) -> None:
            raise MemoryError("no room")

        patch.setattr(decoder.runner.target_model, "verify", fail)
        for count in (1, 2):
            with pytest.raises(MemoryError, match="no room"):
                list(scheduler.stream([5, 6], max_new_tokens=9, stop_token_ids=()))
            assert scheduler.num_failed == count
    stream = scheduler.stream([5, 6], max_new_tokens=9, stop_token_ids=())
    assert token_ids(list(stream)) == LANGUAGE.continuation([5, 6], 9)
    until(lambda: scheduler.num_failed == 0)


def test_without_memory_for_a_longer_cache_shorter_texts_go_on(
    make_scheduler: Callable[..., Scheduler], tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has memory for 256 positions; a prompt and a text need more."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, max_num_seqs=4, num_nodes=4, num_threads=1)
    prompts, counts = ([5, 6, 7], [8, 9], [9] * 300, [7] * 200), (60, 90, 4, 120)
    expected = [
        token_ids(list(decoder.stream(prompt, max_new_tokens=count, stop_token_ids=())))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    scheduler = make_scheduler(decoder)

    allocate = SlabKVCache._allocate

    def refuse(cache: SlabKVCache, capacity: int) -> NDArray[np.float32]:
        if capacity > 256:
            raise MemoryError
        return allocate(cache, capacity)

    with monkeypatch.context() as patch:
        patch.setattr(SlabKVCache, "_allocate", refuse)
        streams = [
            scheduler.stream(prompt, max_new_tokens=count, stop_token_ids=())
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        found = [token_ids(list(stream)) for stream in streams[:2]]
        for stream in streams[2:]:
            with pytest.raises(UnavailableError, match=r"^KV cache: the host has no memory for .* 4 texts"):
                list(stream)
    assert found == expected[:2]
    assert (scheduler.num_failed, scheduler.num_running) == (0, 0)
    stream = scheduler.stream(prompts[2], max_new_tokens=counts[2], stop_token_ids=())
    assert token_ids(list(stream)) == expected[2]


def refuse_beyond(cache: SlabKVCache, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cache find no memory for more than so many positions."""
    allocate = cache._allocate

    def refuse(capacity: int) -> NDArray[np.float32]:
        if capacity > most:
            raise MemoryError
        return allocate(capacity)

    monkeypatch.setattr(cache, "_allocate", refuse)


@pytest.mark.parametrize("num_nodes", [4, 0])
@pytest.mark.parametrize("name", ["parallel", "eagle", "hydra++"])
def test_without_memory_for_the_heads_cache_shorter_texts_go_on(
    make_scheduler: Callable[..., Scheduler], name: str, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a draft needs it: a text without drafts goes on, though the head cannot read for what is kept."""
    monkeypatch.setattr("runtime.decode.proposers.base.MAX_PENDING_TOKENS", 40)
    proposer: Any = MAKE_PROPOSER[name]()
    decoder = FakeDecoder(proposer, max_num_seqs=4, num_nodes=num_nodes)
    decoder.batch.prefixes = PrefixCache(2**20)
    refuse_beyond(proposer.engine.kv, 64, monkeypatch)
    scheduler = make_scheduler(decoder)
    prompts = ([5, 7], [5, 8, 9], [5, *range(10, 100)], [5, 6])
    streams = [scheduler.stream(prompt, max_new_tokens=30, stop_token_ids=()) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        if num_nodes and len(prompt) > 64:
            with pytest.raises(UnavailableError, match=r"^KV cache: the host has no memory for .* 4 texts"):
                list(stream)
        else:
            assert token_ids(list(stream)) == LANGUAGE.continuation(prompt, 30)
    assert (scheduler.num_failed, scheduler.num_running) == (0, 0)


def test_without_memory_a_known_prompt_is_read_again(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has no memory for what was kept of the first text, and then for the draft."""
    proposer: Any = MAKE_PROPOSER["parallel"]()
    decoder = FakeDecoder(proposer, max_num_seqs=4, num_nodes=4)
    decoder.batch.prefixes = PrefixCache(2**20)
    scheduler = make_scheduler(decoder)
    prompts = ([5, *range(10, 100)], [5, 6])
    assert len(token_ids(list(scheduler.stream(prompts[0], max_new_tokens=3, stop_token_ids=())))) == 3
    until(lambda: not scheduler.num_running)
    refuse_beyond(proposer.engine.kv, 64, monkeypatch)
    first, second = (scheduler.stream(each, max_new_tokens=9, stop_token_ids=()) for each in prompts)
    with pytest.raises(UnavailableError, match="the host has no memory"):
        list(first)
    assert token_ids(list(second)) == LANGUAGE.continuation(prompts[1], 9)
    assert scheduler.num_failed == 0


def test_a_failed_device_serves_nobody_any_more(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests hear the reason; those that wait, and all that come later, that nothing is served."""
    decoder = FakeDecoder(max_num_seqs=1)
    scheduler = make_scheduler(decoder)
    calls: list[str] = []
    scheduler.on_failure = lambda: calls.append("failed")
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5, 6], 9), held)
    assert held.reached.wait(PATIENCE)
    waiting = scheduler.stream([7], max_new_tokens=9)

    def fail(*args: Any, **options: Any) -> None:
        raise DeviceError("cudaGraphLaunch: unspecified launch failure")

    monkeypatch.setattr(decoder.runner, "step", fail)
    held.go()
    expected = "engine is unusable since its device failed: cudaGraphLaunch: unspecified launch failure"
    with pytest.raises(UnavailableError, match=expected):
        list(waiting)
    (_, last) = held.events
    assert isinstance(last, RequestFailure)
    assert isinstance(last.error, DeviceError)
    assert last.error is scheduler.failure
    with pytest.raises(UnavailableError, match=expected):
        scheduler.stream([7], max_new_tokens=9)
    until(lambda: not scheduler._thread.is_alive())
    assert calls == ["failed"]
    scheduler.stop(drain=True)
    assert scheduler.num_running == scheduler.num_waiting == 0


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_before_the_start_refuses_what_was_queued(drain: bool) -> None:
    scheduler = Scheduler(FakeDecoder())
    stream = scheduler.stream([5], max_new_tokens=9)
    scheduler.stop(drain=drain)
    with pytest.raises(UnavailableError, match="shutting down"):
        list(stream)
    assert scheduler.num_waiting == 0


@pytest.mark.filterwarnings("ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_unasked_is_noticed(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails, and so does what should end its requests: nobody waits, and everybody can see it."""
    decoder = FakeDecoder(max_num_seqs=1)
    scheduler, orderly = make_scheduler(decoder), make_scheduler()
    orderly.stop()

    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("step")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.runner, "step", fail)
        patch.setattr(scheduler, "_fail", fail)
        with pytest.raises(UnavailableError):
            list(scheduler.stream([7], max_new_tokens=9))
        until(lambda: not scheduler._thread.is_alive())
    assert scheduler.has_crashed
    assert not orderly.has_crashed


def test_a_failing_callback_harms_nobody_else(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()

    def fail(event: Chunk | RequestFailure) -> None:
        raise ValueError("cannot be sent")

    request = scheduler.submit(sequence_of(scheduler, [5], 50), fail)
    other = scheduler.stream([6, 7], max_new_tokens=20, stop_token_ids=())
    assert token_ids(list(other)) == LANGUAGE.continuation([6, 7], 20)
    until(lambda: scheduler.num_running == 0)
    assert request.is_cancelled


def test_a_client_that_cannot_be_asked_harms_nobody_else(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(FakeDecoder(max_num_seqs=2))
    events: list[Chunk | RequestFailure] = []

    def fail() -> bool:
        raise OSError("pipe")

    scheduler.submit(sequence_of(scheduler, [5], 200), events.append, fail)
    other = scheduler.stream([6, 7], max_new_tokens=200, stop_token_ids=())
    assert token_ids(list(other)) == LANGUAGE.continuation([6, 7], 200)
    assert isinstance(events[-1], RequestFailure)
    assert isinstance(events[-1].error, OSError)


def test_a_request_whose_admission_is_not_noted_is_not_lost(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()

    def fail(seconds: float) -> None:
        raise ValueError("no metrics")

    scheduler.on_admit = fail
    events: list[Chunk | RequestFailure] = []
    scheduler.submit(sequence_of(scheduler, [5], 9), events.append)
    until(lambda: bool(events) and isinstance(events[-1], RequestFailure))


def test_a_stream_is_closed_while_another_thread_waits(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(FakeDecoder(max_num_seqs=1))
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 9), held)
    assert held.reached.wait(PATIENCE)
    stream = scheduler.stream([6], max_new_tokens=9)
    waiting = threading.Thread(target=lambda: list(stream), daemon=True)
    waiting.start()
    stream.close()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    held.go()


class CountingBudget(AdaptiveBudget):
    """Counts what it hears."""

    def __init__(self, num_seqs: int):
        super().__init__(StepCosts(np.add.outer(np.arange(1.0, num_seqs + 1), 0.05 * np.arange(17.0))), None)
        self.results: list[StepResult] = []
        self.times: list[float] = []

    def learn(self, result: StepResult, ms: float | None = None) -> None:
        assert ms is not None
        self.results.append(result)
        self.times.append(ms)
        super().learn(result, ms)


def test_a_shared_budget() -> None:
    """One budget for all requests chooses the sizes, and hears of every step's result and time."""
    budget = CountingBudget(3)
    scheduler = Scheduler(FakeDecoder(max_num_seqs=3, new_budget=lambda: budget))
    # All requests wait when the scheduler starts, so that it decodes as many at a time as it can.
    streams = [scheduler.stream(prompt_of(index), **options_of(index)) for index in range(6)]
    plain = FakeDecoder(NoProposer())
    with scheduler:
        for index, stream in enumerate(streams):
            expected = plain.stream(prompt_of(index), **options_of(index))
            assert token_ids(list(stream)) == token_ids(list(expected))
    assert len(budget.results) == len(budget.times)
    assert min(budget.times) > 0
    assert max(result.counts.size for result in budget.results) == 3
    assert max(result.node_log_probs.shape[1] for result in budget.results) > 0


def test_texts_that_come_later_have_a_budget_of_their_own() -> None:
    """A text that the head does not know must not take the drafts from the next one."""
    budgets: list[CountingBudget] = []

    def new_budget() -> CountingBudget:
        budgets.append(CountingBudget(1))
        return budgets[-1]

    with Scheduler(FakeDecoder(new_budget=new_budget)) as scheduler:
        for index in range(3):
            list(scheduler.stream(prompt_of(index), **options_of(index)))
    assert sum(bool(budget.results) for budget in budgets) == 3


def test_abandoned_requests_are_given_up(make_scheduler: Callable[..., Scheduler]) -> None:
    """While they wait for a slot, and while they have one."""
    scheduler = make_scheduler()
    held, left = Held(), threading.Event()
    events: list[list[Chunk | RequestFailure]] = [[] for _ in range(6)]
    scheduler.submit(sequence_of(scheduler, [5], 400), held, left.is_set)
    assert held.reached.wait(PATIENCE)
    for index in range(6):
        scheduler.submit(sequence_of(scheduler, [6, index], 400), events[index].append, left.is_set)
    stays = scheduler.stream([9], max_new_tokens=12, stop_token_ids=())
    left.set()
    held.go()
    assert token_ids(list(stays)) == LANGUAGE.continuation([9], 12)
    until(lambda: all(ended and isinstance(ended[-1], RequestFailure) for ended in (held.events, *events)))
    for ended in (held.events, *events):
        assert isinstance(ended[-1], RequestFailure)
        assert isinstance(ended[-1].error, CancelledError)
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_requests_are_served_in_turn(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(FakeDecoder(max_num_seqs=1))
    held = Held()
    scheduler.submit(sequence_of(scheduler, [5], 1), held)
    assert held.reached.wait(PATIENCE)
    found: list[list[Chunk | RequestFailure]] = [[] for _ in range(5)]
    order: list[int] = []

    def callback_of(index: int) -> Callable[[Chunk | RequestFailure], None]:
        def hear(event: Chunk | RequestFailure) -> None:
            found[index].append(event)
            order.append(index)

        return hear

    for index in range(5):
        scheduler.submit(sequence_of(scheduler, [6, index], 20), callback_of(index))
    held.go()
    until(lambda: all(sum(len(e.pieces) for e in events if isinstance(e, Chunk)) == 20 for events in found))
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "expected"),
    [(64, 0.1, 64), (64, 0.4, 16), (512, 0.05, 512), (16, 3.0, 16), (5, 0.0, 512), (40, 0.03, 128)],
)
def test_chunks_are_as_large_as_their_time_allows(num_tokens: int, seconds: float, expected: int) -> None:
    """A tenth of a second, in powers of two, by the time that the last one took."""
    assert affordable_chunk(num_tokens, seconds) == expected

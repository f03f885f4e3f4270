"""Requests from many threads: each gets its own text, leaves no trace, and nobody waits for ever."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.decoder import AUTO, DEFAULT_NUM_NODES, SpeculativeDecoder
from runtime.decoding.sampling import SamplingParams
from runtime.decoding.sequence import Chunk
from runtime.errors import RequestError
from runtime.scheduling.request import CancelledError, RequestFailure, UnavailableError
from runtime.scheduling.scheduler import Scheduler

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 150)
PATIENCE = 60


def options_of(index: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": 8 + 5 * (index % 7), "stop_token_ids": ()}
    if index % 4 == 1:
        options["sampling"] = SamplingParams(temperature=0.9, top_k=20, seed=index)
    if index % 4 == 2:
        options["stop_strings"] = ["e"]
    return options


@pytest.fixture(scope="module")
def decoder(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_rows=4, num_threads=1)


@pytest.fixture
def make_scheduler(decoder: SpeculativeDecoder) -> Iterator[Callable[..., Scheduler]]:
    started = []

    def make(**options: Any) -> Scheduler:
        scheduler = Scheduler(decoder, **options)
        started.append(scheduler)
        scheduler.start()
        return scheduler

    yield make
    for scheduler in started:
        scheduler.stop(drain=False)


@pytest.fixture(scope="module")
def vanilla(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)


def prompt_of(decoder: SpeculativeDecoder, index: int) -> list[int]:
    return decoder.prompt_tokenizer.encode(PROMPTS[index % len(PROMPTS)])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


class Held:
    """A sink that stops the scheduler's thread at its first call, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.found: list[Chunk | RequestFailure] = []

    def __call__(self, found: Chunk | RequestFailure) -> None:
        self.found.append(found)
        self.reached.set()
        assert self.go.wait(PATIENCE)


def test_everybody_gets_their_own_text(
    make_scheduler: Callable[..., Scheduler], vanilla: SpeculativeDecoder
) -> None:
    scheduler = make_scheduler(prompt_tokens=16)
    count = 40
    found: dict[int, list[Chunk]] = {}

    def ask(index: int) -> None:
        time.sleep(0.01 * (index % 5))
        found[index] = list(scheduler.stream(prompt_of(vanilla, index), **options_of(index)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == count
    for index, chunks in found.items():
        expected = list(vanilla.stream(prompt_of(vanilla, index), **options_of(index)))
        assert [t for c in chunks for t in c.token_ids] == [t for c in expected for t in c.token_ids]
        assert "".join(c.text for c in chunks) == "".join(c.text for c in expected)
        assert chunks[-1].finish_reason == expected[-1].finish_reason
    until(lambda: scheduler.num_running == 0)
    assert scheduler.decoder.batch.rows == []


def test_a_cancelled_request_frees_its_row_within_a_step(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()
    batch = scheduler.decoder.batch
    held = Held()
    options = {"max_new_tokens": 400, "stop_token_ids": ()}
    ticket = scheduler.submit(scheduler.decoder.row([5, 6], **options), held)  # type: ignore[arg-type]
    other = scheduler.stream([7, 8], max_new_tokens=30, stop_token_ids=())
    assert held.reached.wait(PATIENCE)
    ticket.cancel()
    held.go.set()
    assert len([t for c in other for t in c.token_ids]) == 30
    until(lambda: scheduler.num_running == 0)
    assert len(held.found) == 1
    assert batch.rows == []
    # The prompt, and what the step in progress gave.
    assert ticket.row.length <= 2 + 1 + DEFAULT_NUM_NODES


@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_stream_is_cancelled(make_scheduler: Callable[..., Scheduler], begun: bool) -> None:
    scheduler = make_scheduler()
    held = Held()
    scheduler.submit(scheduler.decoder.row([7], max_new_tokens=2, stop_token_ids=()), held)
    assert held.reached.wait(PATIENCE)
    stream = scheduler.stream([5, 6], max_new_tokens=400, stop_token_ids=())
    ticket = stream._ticket
    if begun:
        held.go.set()
        next(stream)
    stream.close()
    held.go.set()
    until(lambda: scheduler.num_running == scheduler.num_waiting == 0)
    assert scheduler.decoder.batch.rows == []
    assert ticket.row.length < (300 if begun else 1)
    assert list(stream) == []


def test_a_long_prompt_does_not_stall_the_others(make_scheduler: Callable[..., Scheduler]) -> None:
    """While it is read, in pieces, they go on."""
    scheduler = make_scheduler(prompt_tokens=16)
    row = scheduler.decoder.row
    order: list[str] = []
    held = Held()

    def hear(found: Chunk | RequestFailure) -> None:
        held(found)
        order.append("other")

    scheduler.submit(row([5, 6], max_new_tokens=400, stop_token_ids=()), hear)
    assert held.reached.wait(PATIENCE)
    ended = threading.Event()

    def begun(found: Chunk | RequestFailure) -> None:
        order.append("long")
        ended.set()

    scheduler.submit(row([9] * 480, max_new_tokens=1, stop_token_ids=()), begun)
    held.go.set()
    assert ended.wait(PATIENCE)
    # The first was before; a prompt read at once would let through one more at most.
    assert order.index("long") > 3


def test_a_full_queue_refuses_at_once(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler(max_queue_size=3)
    held = Held()
    row = scheduler.decoder.row
    scheduler.submit(row([5], max_new_tokens=9, stop_token_ids=()), held)
    assert held.reached.wait(PATIENCE)
    waiting = [scheduler.stream([6, index], max_new_tokens=9, stop_token_ids=()) for index in range(3)]
    with pytest.raises(UnavailableError, match="queue: must hold at most 3 requests, and is full"):
        scheduler.stream([7], max_new_tokens=9)
    held.go.set()
    for stream in waiting:
        assert len([t for c in stream for t in c.token_ids]) == 9


def test_bad_requests_never_reach_the_queue(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="prompt: must not be empty"):
        scheduler.stream([], max_new_tokens=4)
    assert scheduler.num_waiting == scheduler.num_running == 0


def test_draining_and_failing(make_scheduler: Callable[..., Scheduler]) -> None:
    for drain in (True, False):
        scheduler = make_scheduler()
        held = Held()
        row = scheduler.decoder.row
        scheduler.submit(row([5], max_new_tokens=9, stop_token_ids=()), held)
        assert held.reached.wait(PATIENCE)
        running = scheduler.stream([6, 7], max_new_tokens=20, stop_token_ids=())
        stopper = threading.Thread(target=scheduler.stop, kwargs={"drain": drain})
        stopper.start()
        until(lambda: scheduler._stopping)  # noqa: B023
        with pytest.raises(UnavailableError, match="shutting down"):
            scheduler.stream([7], max_new_tokens=9)
        held.go.set()
        if drain:
            assert len([t for c in running for t in c.token_ids]) == 20
        else:
            with pytest.raises(UnavailableError, match="shutting down"):
                list(running)
        stopper.join(PATIENCE)
        assert not stopper.is_alive()


def test_a_failing_step_fails_the_running_and_serves_the_next(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler()
    batch = scheduler.decoder.batch
    with monkeypatch.context() as patch:
        patch.setattr(batch.backbone, "verify", lambda: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            list(scheduler.stream([5, 6], max_new_tokens=9, stop_token_ids=()))
    assert (
        len([t for c in scheduler.stream([5, 6], max_new_tokens=9, stop_token_ids=()) for t in c.token_ids])
        == 9
    )


def test_a_failing_sink_harms_nobody_else(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_scheduler()

    def fail(found: Chunk | RequestFailure) -> None:
        raise ValueError("cannot be sent")

    ticket = scheduler.submit(scheduler.decoder.row([5], max_new_tokens=50, stop_token_ids=()), fail)
    other = list(scheduler.stream([6, 7], max_new_tokens=20, stop_token_ids=()))
    assert len([t for c in other for t in c.token_ids]) == 20
    until(lambda: scheduler.num_running == 0)
    assert ticket.is_cancelled


def test_a_shared_budget(tiny_bundle_dir: Path, vanilla: SpeculativeDecoder) -> None:
    """Sizes that the budget chooses, and the costs it chooses by."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_rows=3, num_nodes=AUTO, num_threads=1)
    assert decoder.budget is not None
    step_ms = decoder.budget.step_ms
    assert step_ms.shape == (3, decoder.budget.num_nodes + 1)
    assert np.all(np.diff(step_ms, axis=1) >= 0)
    with Scheduler(decoder) as scheduler:
        streams = [scheduler.stream(prompt_of(decoder, index), **options_of(index)) for index in range(6)]
        for index, stream in enumerate(streams):
            expected = vanilla.stream(prompt_of(decoder, index), **options_of(index))
            assert [t for c in stream for t in c.token_ids] == [t for c in expected for t in c.token_ids]


def test_abandoned_requests_are_given_up(make_scheduler: Callable[..., Scheduler]) -> None:
    """While they wait for a row, and while they have one."""
    scheduler = make_scheduler()
    row = scheduler.decoder.row
    held, left = Held(), threading.Event()
    options = {"max_new_tokens": 400, "stop_token_ids": ()}
    found: list[list[Chunk | RequestFailure]] = [[] for _ in range(6)]
    scheduler.submit(row([5], **options), held, left.is_set)  # type: ignore[arg-type]
    assert held.reached.wait(PATIENCE)
    for index in range(6):
        scheduler.submit(row([6, index], **options), found[index].append, left.is_set)  # type: ignore[arg-type]
    stays = scheduler.stream([9], max_new_tokens=12, stop_token_ids=())
    left.set()
    held.go.set()
    assert len([t for c in stays for t in c.token_ids]) == 12
    until(lambda: scheduler.num_running == scheduler.num_waiting == 0)
    for ended in (held.found, *found):
        assert isinstance(ended[-1], RequestFailure)
        assert isinstance(ended[-1].error, CancelledError)

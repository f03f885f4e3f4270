"""Requests on their way to a model: how many may wait to be read, and those whose clients have left."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from triton_repo.triton.model import ServedModel
from triton_repo.triton.tensors import CANCELLED, UNAVAILABLE
from triton_repo.worker import service
from triton_repo.worker.service import Model

PATIENCE = 30


class Counter:
    def __init__(self) -> None:
        self.failures: list[str] = []

    def add_failure(self, reason: str) -> None:
        self.failures.append(reason)


class Sender:
    def __init__(self, *, has_left: bool = False) -> None:
        self.has_left = has_left
        self.failures: list[tuple[str, str]] = []

    def fail(self, reason: str, message: str) -> None:
        self.failures.append((reason, message))

    def is_cancelled(self) -> bool:
        return self.has_left


class SlowModel:
    """Reads a request once it may."""

    def __init__(self) -> None:
        self.metrics = Counter()
        self.intake = ThreadPoolExecutor(1)
        self.may_read = threading.Event()
        self.has_read = threading.Semaphore(0)

    def take(self, read: Callable[[], Any], sender: Sender) -> None:
        assert self.may_read.wait(PATIENCE)
        self.has_read.release()


def test_requests_beyond_those_that_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_UNREAD", 2)
    served = SlowModel()
    model: Any = Model(None, served)  # type: ignore[arg-type]
    senders = [Sender() for _ in range(4)]
    for sender in senders:
        model.take(None, sender)
    refused = [(UNAVAILABLE, "queue: 2 requests wait to be read")]
    assert [sender.failures for sender in senders] == [[], [], refused, refused]
    assert served.metrics.failures == [UNAVAILABLE] * 2
    served.may_read.set()
    served.intake.shutdown()
    assert served.has_read.acquire(timeout=PATIENCE)
    assert served.has_read.acquire(timeout=PATIENCE)
    assert model.places.acquire(blocking=False)


def test_nothing_is_read_for_a_client_that_has_left() -> None:
    model: Any = object.__new__(ServedModel)
    model.metrics = Counter()
    sender: Any = Sender(has_left=True)

    def read() -> Any:
        raise AssertionError("must not be read")

    model.take(read, sender)
    assert sender.failures == [(CANCELLED, "the client has left")]
    assert model.metrics.failures == [CANCELLED]


def test_a_model_is_drained_when_all_its_requests_have_been_read() -> None:
    """Those that wait to be read, and those whose grammars are compiled, are told why they are not served."""
    model: Any = object.__new__(ServedModel)
    model._scheduler = SimpleNamespace(stop=lambda: None, max_queue_size=9)
    model.intake, model._readers, model._reading = ThreadPoolExecutor(1), ThreadPoolExecutor(1), set()
    may_read, may_compile = threading.Event(), threading.Event()

    def read() -> None:
        assert may_read.wait(PATIENCE)
        model._submit(SimpleNamespace(grammar="a grammar"), Sender())

    model._queue = lambda request, sender: may_compile.wait(PATIENCE)
    model.intake.submit(read)
    draining = threading.Thread(target=model._drain)
    draining.start()
    for event in (may_read, may_compile):
        draining.join(0.2)
        assert draining.is_alive()
        event.set()
    draining.join(PATIENCE)
    assert not draining.is_alive()
    assert not model._reading

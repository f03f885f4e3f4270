"""A request in the scheduler's hands, and the two ends of its answer."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runtime.decoding.sequence import Chunk, Row
from runtime.errors import UserError


class UnavailableError(UserError):
    """The request is fine, but it cannot be taken now: try again later, or elsewhere."""


@dataclass(frozen=True)
class RequestFailure:
    """In place of a chunk: the request ends with an error."""

    error: Exception


# Called from the scheduler's thread, so it must not block; the last one has a finish_reason or is an error.
Callback = Callable[[Chunk | RequestFailure], None]


class CancelledError(UserError):
    """Nobody waits for the answer any more."""


class Request:
    """A request in the scheduler's hands.

    abandoned: asked every now and then, from the scheduler's thread, whether nobody wants the answer
    submitted: ``time.monotonic`` seconds
    """

    def __init__(self, row: Row, sink: Callback, abandoned: Callable[[], bool] | None = None):
        self.row = row
        self.sink = sink
        self._abandoned = abandoned
        self._asked = 0.0
        self.submitted = time.monotonic()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Free the request's place within a step; its sink is not called any more. Any thread may."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def is_abandoned(self, now: float, every: float) -> bool:
        """Whether ``abandoned`` says so, which is asked every so many seconds."""
        if self._abandoned is None or now < self._asked + every:
            return False
        self._asked = now
        return self._abandoned()


class ChunkStream(Iterator[Chunk]):
    """One request's chunks, waited for. Closing it, or letting go of it, cancels the request."""

    def __init__(self, ticket: Request, chunks: "queue.SimpleQueue[Chunk | RequestFailure]"):
        self._ticket = ticket
        self._chunks = chunks
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        found = self._chunks.get()
        if isinstance(found, RequestFailure):
            self._ended = True
            raise found.error
        self._ended = found.finish_reason is not None
        return found

    def close(self) -> None:
        self._ended = True
        self._ticket.cancel()

    def __del__(self) -> None:
        self.close()

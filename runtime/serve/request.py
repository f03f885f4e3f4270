"""One request to a scheduler: its sequence, its receiver, and why it may be refused or end early."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runtime.core.errors import UserError
from runtime.decode.sequence import Chunk, SequenceState


class UnavailableError(UserError):
    """The request is fine, but it cannot be taken now: try again later, or elsewhere."""


class CancelledError(UserError):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class RequestFailure:
    """Ends a request with an error, in place of a last chunk."""

    error: Exception


# Called from the scheduler's thread, so it must not block. The last call has a chunk with a finish_reason, or
# a failure.
Callback = Callable[[Chunk | RequestFailure], None]


class Request:
    """A sequence to decode, and who receives its chunks.

    is_abandoned: called now and then from the scheduler's thread; true if nobody wants the answer any more
    """

    number = 0  # of requests that were submitted before this one

    def __init__(
        self, sequence: SequenceState, callback: Callback, is_abandoned: Callable[[], bool] | None = None
    ):
        self.sequence = sequence
        self.callback = callback
        self._is_abandoned = is_abandoned
        self._asked = 0.0
        self.submitted = time.monotonic()  # seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Free the request's slot within a step; its callback is called no more. Safe from any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def is_abandoned(self, now: float, interval: float) -> bool:
        """Whether the client has left, which is asked once in ``interval`` seconds."""
        if self._is_abandoned is None or now < self._asked + interval:
            return False
        self._asked = now
        return self._is_abandoned()


class ChunkStream(Iterator[Chunk]):
    """An iterator that waits for one request's chunks. Closing or dropping it cancels the request.

    It may be closed from another thread than the one that waits.
    """

    def __init__(self, request: Request, chunks: "queue.SimpleQueue[Chunk | RequestFailure | None]"):
        """chunks: None ends the iteration"""
        self._request = request
        self._chunks = chunks
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        event = self._chunks.get()
        if event is None:
            raise StopIteration
        if isinstance(event, RequestFailure):
            self._ended = True
            raise event.error
        self._ended = event.finish_reason is not None
        return event

    def close(self) -> None:
        self._ended = True
        self._request.cancel()
        self._chunks.put(None)

    def __del__(self) -> None:
        self.close()

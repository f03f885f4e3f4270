"""A request in the scheduler's hands, and the two ends of its answer."""

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
    """In place of a chunk: the request ends with an error."""

    error: Exception


# Called from the scheduler's thread, so it must not block. The last call has a chunk with a finish_reason, or
# a failure.
Callback = Callable[[Chunk | RequestFailure], None]


class Request:
    """A sequence to decode, and who receives its chunks.

    is_abandoned: asked now and then, from the scheduler's thread, whether nobody wants the answer any more
    submitted: ``time.monotonic`` seconds
    """

    def __init__(
        self, sequence: SequenceState, callback: Callback, is_abandoned: Callable[[], bool] | None = None
    ):
        self.sequence = sequence
        self.callback = callback
        self._is_abandoned = is_abandoned
        self._asked = 0.0
        self.submitted = time.monotonic()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Free the request's slot within a step; its callback is not called any more. Any thread may."""
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
    """One request's chunks, waited for. Closing it, or dropping it, cancels the request."""

    def __init__(self, request: Request, chunks: "queue.SimpleQueue[Chunk | RequestFailure]"):
        self._request = request
        self._chunks = chunks
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        event = self._chunks.get()
        if isinstance(event, RequestFailure):
            self._ended = True
            raise event.error
        self._ended = event.finish_reason is not None
        return event

    def close(self) -> None:
        self._ended = True
        self._request.cancel()

    def __del__(self) -> None:
        self.close()

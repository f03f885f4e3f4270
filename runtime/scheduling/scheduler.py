"""Many requests at once: a thread that decodes them together and hands every step's text out.

    decoder = SpeculativeDecoder.from_bundle("engines/", num_rows=16, num_nodes=AUTO)
    with Scheduler(decoder) as scheduler:
        for chunk in scheduler.stream(prompt_ids, max_new_tokens=128):
            print(chunk.text, end="", flush=True)

Requests join and leave between steps. Between two steps prompts are read, in pieces, for as long as a step
takes, so that those who already decode do not wait long. What a request gets does not depend on the others.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from runtime.decoder import SpeculativeDecoder
from runtime.decoding.sequence import Chunk, Row
from runtime.scheduling.request import (
    Callback,
    CancelledError,
    ChunkStream,
    Request,
    RequestFailure,
    UnavailableError,
)

LOGGER = logging.getLogger(__name__)
DEFAULT_MAX_QUEUE_SIZE = 64
# Prompt tokens read at a time while others decode.
DEFAULT_PREFILL_CHUNK_SIZE = 64
# Seconds between two questions whether a request's client is still there: while it has a row, and while it
# waits for one. Each is a message to the server and back, and more may wait than are decoded.
ASK_EVERY, ASK_WAITING_EVERY = 0.02, 0.25


class Scheduler:
    """Serves a decoder's rows. Only the scheduler's thread may use the decoder after ``start``, but
    ``decoder.row`` and its tokenizer, which change nothing.

    max_queue_size: requests that may wait for a free row; more are refused
    prompt_tokens: of a prompt, read at a time while others decode
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        prompt_tokens: int = DEFAULT_PREFILL_CHUNK_SIZE,
    ):
        self.decoder = decoder
        self.max_queue_size = max_queue_size
        self.prompt_tokens = prompt_tokens
        # Requests taken, and how long they have waited for a row, all together.
        self.num_submitted = 0
        self.queue_seconds = 0.0
        self._plan = decoder.plan()
        self._waiting: deque[Request] = deque()
        self._tickets: dict[Row, Request] = {}
        self._changed = threading.Condition()
        # What the last step took: so long prompts may be read before the next one.
        self._step_seconds = 0.0
        self._stopping = self._aborting = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(drain=error is None)

    def start(self) -> None:
        self.decoder.batch.clear()
        self._thread.start()

    def stop(self, *, drain: bool = True) -> None:
        """Take no more requests, and return when the others have ended; or fail them now."""
        with self._changed:
            self._stopping = True
            self._aborting = not drain
            self._changed.notify()
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._tickets)

    def submit(self, row: Row, sink: Callback, abandoned: Callable[[], bool] | None = None) -> Request:
        """Queue a request, made by ``decoder.row``; its chunks go to the sink.

        An abandoned one is given up within a step, and its sink is told (CancelledError).
        Raises UnavailableError when too many wait already, and after ``stop``.
        """
        ticket = Request(row, sink, abandoned)
        with self._changed:
            if self._stopping:
                raise UnavailableError("the server is shutting down and takes no more requests")
            if len(self._waiting) >= self.max_queue_size:
                raise UnavailableError(
                    f"queue: must hold at most {self.max_queue_size} requests, and is full"
                )
            self._waiting.append(ticket)
            self.num_submitted += 1
            self._changed.notify()
        return ticket

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> ChunkStream:
        """Chunks as they come; options are those of ``SpeculativeDecoder.row``.

        Raises what ``row`` and ``submit`` raise, at once.
        """
        chunks: queue.SimpleQueue[Chunk | RequestFailure] = queue.SimpleQueue()
        return ChunkStream(self.submit(self.decoder.row(prompt_ids, **options), chunks.put), chunks)

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                except Exception as error:
                    # Whatever it was, the caches are in an unknown state: those who had a row have lost it.
                    LOGGER.exception("a step failed, and with it the requests that were being decoded")
                    self._fail(error)
        finally:
            # Should even that have failed, nobody is to wait for a thread that is gone.
            self._abort()

    def _fail(self, error: Exception) -> None:
        """End the requests that have a row."""
        for ticket in list(self._tickets.values()):
            self._deliver(ticket, RequestFailure(error))
        self.decoder.batch.clear()

    def _abort(self) -> None:
        """End all requests, and take no more."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = self._waiting, deque()
        for ticket in (*waiting, *self._tickets.values()):
            self._deliver(ticket, RequestFailure(UnavailableError("the server is shutting down")))
        self.decoder.batch.clear()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when there never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._tickets or self._stopping)
            return bool(self._waiting or self._tickets)

    def _turn(self) -> None:
        """Let requests go and come, read on in a prompt, decode a step."""
        batch = self.decoder.batch
        if self._aborting:
            self._abort()
        self._let_go()
        self._read_prompts(time.monotonic() + self._step_seconds)
        if batch.rows:
            begin = time.monotonic()
            for row, chunk in batch.step(self._plan):
                self._deliver(self._tickets[row], chunk)
            self._step_seconds = time.monotonic() - begin
            self._plan.took(1000 * self._step_seconds)

    def _read_prompts(self, end: float) -> None:
        """Admit requests and read on in their prompts: a piece, and more until ``end``.

        Half of the time stays with those who decode.
        """
        batch = self.decoder.batch
        while True:
            self._admit()
            entering = batch.entering
            if entering is None:
                return
            chunk = batch.read_prompt(self.prompt_tokens if batch.rows else None)
            if chunk is not None:
                self._deliver(self._tickets[entering], chunk)
            if time.monotonic() >= end:
                return

    def _let_go(self) -> None:
        """Give up the requests that nobody wants any more."""
        now = time.monotonic()
        with self._changed:
            tickets = (*self._waiting, *self._tickets.values())
        for ticket in tickets:
            has_row = ticket.row in self._tickets
            every = ASK_EVERY if has_row else ASK_WAITING_EVERY
            abandoned = not ticket.is_cancelled and ticket.is_abandoned(now, every)
            if not (abandoned or ticket.is_cancelled):
                continue
            if has_row:
                self.decoder.batch.remove(ticket.row)
                del self._tickets[ticket.row]
            else:
                with self._changed:
                    self._waiting.remove(ticket)
            if abandoned:
                self._deliver(ticket, RequestFailure(CancelledError("the client has left")))

    def _admit(self) -> None:
        """Give a free row to whoever has waited longest."""
        with self._changed:
            if not self._waiting or not self.decoder.batch.has_room:
                return
            ticket = self._waiting.popleft()
        self.queue_seconds += time.monotonic() - ticket.submitted
        self._tickets[ticket.row] = ticket
        self.decoder.batch.admit(ticket.row)

    def _deliver(self, ticket: Request, found: Chunk | RequestFailure) -> None:
        if isinstance(found, RequestFailure) or found.finish_reason is not None:
            self._tickets.pop(ticket.row, None)
        if ticket.is_cancelled:
            return
        try:
            ticket.sink(found)
        except Exception:
            LOGGER.exception("a request's sink failed; the request is cancelled")
            ticket.cancel()

"""Many requests at once: a thread that decodes them together and hands out the text of every step.

    decoder = SpeculativeDecoder.from_bundle("engines/", max_num_seqs=16, num_nodes=None)
    with Scheduler(decoder) as scheduler:
        for chunk in scheduler.stream(prompt_ids, max_new_tokens=128):
            print(chunk.text, end="", flush=True)

Requests join and leave between steps. Between two steps prompts are prefilled in chunks, for as long as a
step takes, so that the sequences that decode do not wait long. Several prompts may be half read: the next
chunk is one of the prompt with the fewest unread tokens, and every fourth chunk is one of the oldest request.
So a short prompt waits for at most three chunks of longer ones, and a long one is not starved. The output of
a request does not depend on the others.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from runtime.core.errors import CacheMemoryError, DeviceError, DeviceMemoryError
from runtime.core.options import (
    DEFAULT_MAX_QUEUE_SIZE,
    DEFAULT_MAX_QUEUE_TOKENS,
    MAX_PREFILL_CHUNK,
    SHARED_PREFILL_CHUNK,
)
from runtime.decode.budget import NodeBudget
from runtime.decode.sequence import Chunk, SequenceState
from runtime.decoder import SpeculativeDecoder
from runtime.serve.request import (
    Callback,
    CancelledError,
    ChunkStream,
    Request,
    RequestFailure,
    UnavailableError,
)

LOGGER = logging.getLogger(__name__)
# Seconds between two questions whether a request's client is still there, while it is decoded and while it is
# queued. Each question is a message to the server and back, and the queue may be longer than the batch.
RUNNING_INTERVAL, QUEUED_INTERVAL = 0.02, 0.25
# Chunks of shorter prompts after which the oldest request gets one.
SHORT_CHUNKS = 3
# A chunk takes about so many seconds at most, since a request that comes meanwhile waits for its end.
CHUNK_SECONDS = 0.1
MIN_CHUNK = 16


def affordable_chunk(num_tokens: int, seconds: float) -> int:
    """Tokens of a prompt that take CHUNK_SECONDS if ``num_tokens`` took ``seconds``.

    A power of two from MIN_CHUNK to MAX_PREFILL_CHUNK, because engines of a device prepare every size anew.
    """
    tokens = max(num_tokens, 1) * CHUNK_SECONDS / max(seconds, 1e-9)
    size = MIN_CHUNK
    while size < MAX_PREFILL_CHUNK and 2 * size <= tokens:
        size *= 2
    return size


class Scheduler:
    """Serves a decoder's slots. After ``start`` only its own thread may use the decoder, except for
    ``decoder.new_sequence`` and its tokenizer, which change nothing.

    max_queue_size: requests that may wait beyond the free slots; more are refused
    max_queue_tokens: tokens of prompts that may wait to be read; a request that would bring more is refused,
        unless none wait or its prompt is one of those that wait, as with several choices
    prefill_chunk_size: tokens of a prompt read at a time while others decode, or wait to be read
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        max_queue_tokens: int = DEFAULT_MAX_QUEUE_TOKENS,
        prefill_chunk_size: int = SHARED_PREFILL_CHUNK,
    ):
        self.decoder = decoder
        self.max_queue_size = max_queue_size
        self.max_queue_tokens = max_queue_tokens
        self.prefill_chunk_size = prefill_chunk_size
        # Requests taken.
        self.num_submitted = 0
        # Why no request is served any more, and what is called then, once, from the scheduler's thread.
        self.failure: DeviceError | None = None
        self.on_failure: Callable[[], None] | None = None
        # Called from the scheduler's thread with the seconds that a request has waited for its slot.
        self.on_admit: Callable[[float], None] | None = None
        # Steps that failed one after the other, for another reason than a device.
        self.num_failed = 0
        # Whether its thread has ended without being asked to, for another reason than a failed device.
        self.has_crashed = False
        self._batch = decoder.batch
        # Of the texts that run; made anew when none does.
        self._budget: NodeBudget
        self._queue: deque[Request] = deque()
        self._running: dict[SequenceState, Request] = {}
        # Tokens that may be read at a time, by the time that the last ones took.
        self._affordable_chunk = MAX_PREFILL_CHUNK
        # Chunks of shorter prompts since the oldest request had one.
        self._num_short_chunks = 0
        self._changed = threading.Condition()
        # What the last step took: prompts may be read for as long before the next one.
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
        self._batch.clear()
        self._thread.start()

    def stop(self, *, drain: bool = True) -> None:
        """Take no more requests, and return when the others have ended; without ``drain`` fail them now."""
        with self._changed:
            self._stopping, self._aborting = True, not drain
            self._changed.notify()
        if self._thread.ident is None:  # never started
            self._abort()
        else:
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_prefix_hit_tokens(self) -> int:
        """Tokens of prompts that were not read because their keys and values had been kept."""
        prefixes = self._batch.prefixes
        return prefixes.num_hit_tokens if prefixes else 0

    @property
    def cache_usage(self) -> float:
        """The share of the positions of all slots that hold tokens, from 0 to 1."""
        decoder = self.decoder
        held = sum(sequence.length for sequence in list(self._running))
        return held / (decoder.batch.runner.max_num_seqs * decoder.max_length)

    @property
    def num_unread_tokens(self) -> int:
        """Tokens of prompts that have not been read yet, in the queue and in slots."""
        return sum(sequence.num_unread for sequence in self._unread_sequences())

    def _unread_sequences(self) -> list[SequenceState]:
        return [*(request.sequence for request in tuple(self._queue)), *self._batch.prefilling]

    def submit(
        self, sequence: SequenceState, callback: Callback, is_abandoned: Callable[[], bool] | None = None
    ) -> Request:
        """Queue a sequence made by ``decoder.new_sequence``; its chunks go to the callback.

        An abandoned request is dropped within a step, and its callback receives a CancelledError.
        Raises UnavailableError when the queue is full or too many tokens wait to be read, after ``stop``, and
        once the device has failed.
        """
        request = Request(sequence, callback, is_abandoned)
        with self._changed:
            if self._stopping:
                raise self._refusal()
            # Those that a free slot waits for leave the queue with the next chunks.
            free = max(0, self.decoder.batch.runner.max_num_seqs - len(self._running))
            if len(self._queue) - free >= self.max_queue_size:
                raise UnavailableError(f"queue: it is full with {self.max_queue_size} requests")
            waiting = self.num_unread_tokens
            has_room = not waiting or waiting + sequence.num_unread <= self.max_queue_tokens
            if not has_room and not any(
                np.array_equal(each.prompt, sequence.prompt) for each in self._unread_sequences()
            ):
                raise UnavailableError(
                    f"queue: {waiting} tokens of prompts wait to be read, with the {sequence.num_unread} of "
                    f"this one they would be more than {self.max_queue_tokens}"
                )
            request.number = self.num_submitted
            self._queue.append(request)
            self.num_submitted += 1
            self._changed.notify()
        return request

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> ChunkStream:
        """Chunks as they come; options and errors are those of ``decoder.new_sequence`` and ``submit``."""
        chunks: queue.SimpleQueue[Chunk | RequestFailure | None] = queue.SimpleQueue()
        return ChunkStream(self.submit(self.decoder.new_sequence(prompt_ids, **options), chunks.put), chunks)

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                    self.num_failed = 0
                except DeviceMemoryError as error:
                    LOGGER.exception("the device lacks memory for a step; its requests fail")
                    self._fail(error)
                except DeviceError as error:
                    LOGGER.exception("the device failed; no request is served any more")
                    with self._changed:
                        self.failure, self._stopping = error, True
                    self._fail(error)
                    if self.on_failure is not None:
                        self.on_failure()
                    return
                except Exception as error:
                    # The caches are in an unknown state.
                    LOGGER.exception("a step failed, and with it the requests that were being decoded")
                    self.num_failed += 1
                    self._fail(error)
        finally:
            # However the thread ends, no request may go on waiting for it.
            self.has_crashed = not self._stopping
            self._abort()

    def _fail(self, error: Exception) -> None:
        for request in list(self._running.values()):
            self._deliver(request, RequestFailure(error))
        self._batch.clear()

    def _abort(self) -> None:
        """End all requests, and take no more."""
        with self._changed:
            self._stopping = True
            queued, self._queue = self._queue, deque()
        for request in (*queued, *self._running.values()):
            self._deliver(request, RequestFailure(self._refusal()))
        self._batch.clear()

    def _refusal(self) -> UnavailableError:
        if self.failure is not None:
            return UnavailableError(f"the engine is unusable since its device failed: {self.failure}")
        return UnavailableError("the server is shutting down and takes no more requests")

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when there never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._running or self._stopping)
            return bool(self._queue or self._running)

    def _turn(self) -> None:
        """Drop and admit requests, prefill, decode a step."""
        if self._aborting:
            self._abort()
        self._drop_abandoned()
        if not self._running:
            # Texts that come now may be of another kind than those before.
            self._budget = self.decoder.new_budget()
        self._prefill(time.monotonic() + self._step_seconds)
        if self._batch.sequences:
            begin = time.monotonic()
            try:
                found = self._batch.step(self._budget)
            except CacheMemoryError as error:
                longest = max(self._batch.sequences, key=lambda sequence: sequence.length)
                self._end_for_memory(self._running[longest], error)
                return
            for sequence, chunk in found:
                self._deliver(self._running[sequence], chunk)
            self._step_seconds = time.monotonic() - begin

    def _prefill(self, end: float) -> None:
        """Admit requests and read on in their prompts: one chunk, and more until ``end``.

        So about half of the time stays with the sequences that decode.
        """
        while (request := self._next_to_read()) is not None:
            sequence = request.sequence
            if sequence not in self._running:
                self._admit(request)
            is_alone = not (self._queue or self._batch.sequences) and len(self._batch.prefilling) == 1
            most = self.decoder.batch.runner.prefill_chunk_size if is_alone else self.prefill_chunk_size
            begin, unread = time.monotonic(), sequence.num_unread
            if unread > self.prefill_chunk_size:  # a short prompt is not cut
                most = min(most, self._affordable_chunk)
            try:
                chunk = self._batch.prefill(sequence, most)
            except CacheMemoryError as error:
                self._end_for_memory(request, error)
                continue
            self._affordable_chunk = affordable_chunk(unread - sequence.num_unread, time.monotonic() - begin)
            if chunk is not None:
                self._deliver(request, chunk)
            if time.monotonic() >= end:
                return

    def _end_for_memory(self, request: Request, error: CacheMemoryError) -> None:
        """End the one running request that needs a longer cache than there is memory for."""
        LOGGER.error("%s; a request fails", error)
        self._batch.remove(request.sequence)
        self._deliver(request, RequestFailure(UnavailableError(f"{error}; shorter texts are served")))

    def _next_to_read(self) -> Request | None:
        """The request that gets the next chunk: one in a slot, or one of the queue if a slot is free."""
        with self._changed:
            queued = list(self._queue)
        begun = [self._running[sequence] for sequence in self._batch.prefilling]
        waiting = [*queued, *begun]
        able = waiting if self._batch.has_room else begun
        if not able:
            return None
        oldest = min(waiting, key=lambda request: request.number)
        chosen = min(able, key=lambda request: (self._batch.num_unread(request.sequence), request.number))
        if self._num_short_chunks >= SHORT_CHUNKS and oldest in able:
            chosen = oldest
        self._num_short_chunks = 0 if chosen is oldest else self._num_short_chunks + 1
        return chosen

    def _drop_abandoned(self) -> None:
        now = time.monotonic()
        with self._changed:
            requests = (*self._queue, *self._running.values())
        for request in requests:
            is_running = request.sequence in self._running
            interval = RUNNING_INTERVAL if is_running else QUEUED_INTERVAL
            error: Exception | None = None
            try:
                if not request.is_cancelled and request.is_abandoned(now, interval):
                    error = CancelledError("the client has left")
            except Exception as failure:
                LOGGER.exception("whether a client has left cannot be told; its request ends")
                error = failure
            if error is None and not request.is_cancelled:
                continue
            if is_running:
                self._batch.remove(request.sequence)
                del self._running[request.sequence]
            else:
                with self._changed:
                    self._queue.remove(request)
            if error is not None:
                self._deliver(request, RequestFailure(error))

    def _admit(self, request: Request) -> None:
        with self._changed:
            self._queue.remove(request)
        self._running[request.sequence] = request
        self._batch.admit(request.sequence)
        if self.on_admit is not None:
            self.on_admit(time.monotonic() - request.submitted)

    def _deliver(self, request: Request, event: Chunk | RequestFailure) -> None:
        if isinstance(event, Chunk) and event.error is not None:
            event = RequestFailure(event.error)
        if isinstance(event, RequestFailure) or event.finish_reason is not None:
            self._running.pop(request.sequence, None)
        if request.is_cancelled:
            return
        try:
            request.callback(event)
        except Exception:
            LOGGER.exception("a request's callback failed; the request is cancelled")
            request.cancel()

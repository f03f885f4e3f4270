"""A served model: it reads requests as tensors, decodes them in a scheduler, and sends tensors back.

Triton's Python backend and our own worker both hold one for every model. They differ in how tensors come and
go, and in where metrics are kept.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import Bundle
from runtime.core.cli import num_nodes
from runtime.core.errors import DeviceError, RequestError
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Chunk, Piece
from runtime.decoder import SpeculativeDecoder
from runtime.serve.request import RequestFailure, UnavailableError
from runtime.serve.scheduler import Scheduler
from triton_repo.triton.config import instance_device, max_num_seqs, switch
from triton_repo.triton.health import Heartbeat, HeartbeatSender
from triton_repo.triton.metrics import MakeFamily, Metrics
from triton_repo.triton.requests import GenerateRequest, failure, read_request
from triton_repo.triton.tensors import (
    CANCELLED,
    COMPLETIONS,
    INTERNAL,
    LEAST_LOG_PROB,
    NUMPY_TYPES,
    TEXT,
    check_tensors,
    outputs_of,
)

LOGGER = logging.getLogger(__name__)
# Where the bundle is if config.pbtxt names none: this environment variable's value, or this directory.
BUNDLE_VARIABLE, DEFAULT_BUNDLE = "CTC_BUNDLE", "/engines"
WARM_UP_TOKENS = 8
# A process whose steps fail so often, with none between them that does not, is started anew.
MAX_FAILED = 3
# Threads that wait for grammars to be compiled. The thread that takes requests does not wait for them.
NUM_READERS = 4
Tensors = Mapping[str, NDArray[Any]]


class ResponseSender(Protocol):
    """Where the responses to one request go. Its methods are called from several threads, one at a time.

    arrived: when the request came, in ``time.monotonic`` seconds
    """

    arrived: float

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        """Send a response; the last one ends the request."""

    def fail(self, reason: str, message: str) -> None:
        """End the request with an error. reason: one of those that the metrics count"""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""


class ServedModel:
    """Answers every request and ends every stream of responses.

    intake: a thread in which requests can be read in their order, so that their sender need not wait
    """

    def __init__(self, config: Mapping[str, Any], args: Mapping[str, str], make_family: MakeFamily):
        """Load the bundle and start the scheduler.

        config: the model's configuration, as parsed JSON
        args: its name and version and its instance's kind and device, as Triton names them
        make_family: makes the families of its metrics
        Raises if the bundle or the configuration cannot be used, or if the device lacks memory.
        """
        parameters = {name: value.get("string_value", "") for name, value in config["parameters"].items()}
        self.name, self._interface = args["model_name"], parameters["interface"]
        check_tensors(config, self._interface)
        bundle = parameters["bundle"] or os.environ.get(BUNDLE_VARIABLE, DEFAULT_BUNDLE)
        manifest = Bundle.load(bundle, verify=False).manifest  # the decoder verifies the files
        self.decoder = SpeculativeDecoder.from_bundle(
            bundle,
            method=parameters["method"] or None,
            num_nodes=num_nodes(parameters["num_nodes"]),
            max_length=int(parameters["max_length"]) or None,
            max_num_seqs=max_num_seqs(manifest, int(parameters["max_num_seqs"])),
            num_threads=int(parameters["num_threads"]) or None,
            step=parameters["step"] or None,
            device=instance_device(manifest, args),
            prompt_lookup=switch(parameters["prompt_lookup"]),
            prefix_cache_mb=int(parameters["prefix_cache_mb"]),
        )
        self.decoder.prompt_tokenizer.read_files()
        with suppress(RequestError):  # a request with a grammar is told why it cannot be served
            self.decoder.sequence_factory.grammars.prepare()
        _warm_up(self.decoder)
        self._scheduler = Scheduler(
            self.decoder,
            max_queue_size=int(parameters["max_queue_size"]),
            max_queue_tokens=int(parameters["max_queue_tokens"]),
            prefill_chunk_size=int(parameters["prefill_chunk_size"]),
        )
        labels = {"model": self.name, "version": args["model_version"]}
        self.metrics = metrics = Metrics(make_family, labels, self._scheduler)
        self.decoder.batch.runner.recorder = metrics
        self._scheduler.on_failure = metrics.add_failed_device
        self._scheduler.on_admit = lambda seconds: metrics.observe("request_queue_time_seconds", seconds)
        self._scheduler.start()
        self.intake = ThreadPoolExecutor(1, "intake")
        self._readers = ThreadPoolExecutor(NUM_READERS, "reader")
        # Requests whose grammars are compiled.
        self._reading: set[Future[None]] = set()
        self._heartbeats = HeartbeatSender(self._heartbeat, self._drain)

    def take(self, read: Callable[[], Tensors], sender: ResponseSender) -> None:
        """Read a request and queue it; errors are its answer. Its responses come from the scheduler's thread.

        read: returns the request's tensors, or raises RequestError

        Another thread queues a request with a grammar, which has to be compiled. Nothing is read for a client
        that has left.
        """
        if sender.is_cancelled():
            self.metrics.add_failure(CANCELLED)
            sender.fail(CANCELLED, "the client has left")
            return
        self._try(lambda: self._submit(read_request(self._interface, read()), sender), sender)

    def close(self) -> None:
        """Finish the requests that were accepted, then stop the scheduler and free the device's memory."""
        self._heartbeats.close()
        self.intake.shutdown()
        self._readers.shutdown()
        self._scheduler.stop(drain=True)
        try:
            self.decoder.close()
        except DeviceError as error:
            LOGGER.error("the device failed as it was closed: %s", error)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return self._scheduler.failure is None and not self._scheduler.has_crashed

    def _try(self, work: Callable[[], None], sender: ResponseSender) -> None:
        """Do a part of a request's work; errors are its answer."""
        try:
            work()
        except Exception as error:
            reason, message = failure(self._interface, error)
            if reason == INTERNAL:
                LOGGER.exception("a request could not be read")
            self.metrics.add_failure(reason)
            sender.fail(reason, message)

    def _drain(self) -> None:
        """Take no more requests, and return when the others have ended.

        Those that have not been read yet are refused as they would be queued, so that their clients hear why.
        """
        self._scheduler.stop()
        self.intake.submit(lambda: None).result()  # comes after all that wait there
        wait(self._reading.copy())

    def _heartbeat(self) -> Heartbeat:
        scheduler = self._scheduler
        failure = "its scheduler has ended" if scheduler.has_crashed else None
        if scheduler.num_failed >= MAX_FAILED:
            failure = f"its last {scheduler.num_failed} steps failed; the log says why"
        if scheduler.failure is not None:
            failure = f"its device failed: {scheduler.failure}"
        count = scheduler.num_waiting + scheduler.num_running + len(self._reading)
        return Heartbeat(self.name, os.getpid(), count, failure)

    def _submit(self, request: GenerateRequest, sender: ResponseSender) -> None:
        if request.grammar is None:
            self._queue(request, sender)
            return
        most = self._scheduler.max_queue_size
        if len(self._reading) >= most:
            raise UnavailableError(f"queue: {most} requests wait for their grammars")
        future = self._readers.submit(self._try, lambda: self._queue(request, sender), sender)
        self._reading.add(future)
        future.add_done_callback(self._reading.discard)

    def _queue(self, request: GenerateRequest, sender: ResponseSender) -> None:
        try:
            prompt_ids = self._token_ids(request)
            room = max(self.decoder.max_length - len(prompt_ids), 1)
            sequence = self.decoder.new_sequence(
                prompt_ids,
                max_new_tokens=room if request.max_new_tokens is None else request.max_new_tokens,
                stop_token_ids=None if request.end_id is None else [request.end_id],
                stop_strings=request.stop_strings,
                sampling=request.sampling,
                prompt_log_probs=request.prompt_log_probs,
                grammar=request.grammar,
            )
            responder = Responder(
                self._interface, request, len(prompt_ids), sender, self.metrics, self._token_text
            )
            self._scheduler.submit(sequence, responder, sender.is_cancelled)
        except RequestError as error:
            if error.field != "prompt":
                raise
            raise RequestError(error.problem, field=request.prompt_tensor) from error

    def _token_text(self, token: int) -> str:
        return str(self.decoder.prompt_tokenizer.tokenizer.decode([token], skip_special_tokens=False))

    def _token_ids(self, request: GenerateRequest) -> list[int]:
        tokenizer, most = self.decoder.prompt_tokenizer, self.decoder.max_length
        if request.messages is not None:
            options = request.template_options
            return tokenizer.encode_messages(request.messages, options=options, max_tokens=most)
        if not isinstance(request.prompt, str):
            return request.prompt
        return tokenizer.encode(
            request.prompt,
            raw=request.raw,
            max_tokens=most,
            add_special_tokens=request.add_special_tokens,
        )


def _warm_up(decoder: SpeculativeDecoder) -> None:
    """Decode a few tokens, greedy and sampled, so that one-time work does not delay the first client."""
    count = min(WARM_UP_TOKENS, decoder.max_length - 1)
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=8, top_p=0.9, seed=0)):
        for _ in decoder.stream([0], max_new_tokens=count, stop_token_ids=(), sampling=sampling):
            pass


class Responder:
    """Sends one request's responses: every chunk as it comes, or one response at the end.

    The scheduler's thread calls it with every chunk.
    """

    def __init__(
        self,
        interface: str,
        request: GenerateRequest,
        num_input_tokens: int,
        sender: ResponseSender,
        metrics: Metrics,
        token_text: Callable[[int], str],
    ):
        """token_text: the text of one token"""
        self._interface, self._request, self._sender = interface, request, sender
        self._metrics, self._token_text = metrics, token_text
        self._first: float | None = None  # when the first token came
        # What has not been sent yet.
        self._chunks: list[Chunk] = []
        # Outputs that are of the whole text so far. The first chunk comes from prefill and is not a step.
        self._cum_log_prob = 0.0
        self._counts = {
            "num_input_tokens": num_input_tokens,
            "num_cached_tokens": 0,
            "num_output_tokens": 0,
            "num_steps": -1,
            "num_drafted_tokens": 0,
            "num_accepted_tokens": 0,
        }

    def __call__(self, result: Chunk | RequestFailure) -> None:
        if isinstance(result, RequestFailure):
            reason, message = failure(self._interface, result.error)
            self._metrics.add_failure(reason)
            self._sender.fail(reason, message)
            return
        counts = self._counts
        counts["num_steps"] += 1
        counts["num_output_tokens"] += len(result.pieces)
        counts["num_cached_tokens"] += result.num_cached
        counts["num_drafted_tokens"] += result.num_drafts
        counts["num_accepted_tokens"] += sum(piece.drafted for piece in result.pieces)
        self._measure(len(result.pieces), result.finish_reason)
        self._chunks.append(result)
        if self._request.stream or result.finish_reason:
            self._send(result.finish_reason)

    def _measure(self, num_tokens: int, finish_reason: str | None) -> None:
        """Count the new tokens, and the request's times from its arrival on."""
        metrics, now = self._metrics, time.monotonic()
        metrics.add("tokens", num_tokens)
        if self._first is None:
            self._first = now
            metrics.observe("time_to_first_token_seconds", now - self._sender.arrived)
        if finish_reason:
            metrics.add("request_success", label=finish_reason)
            steps, rest = self._counts["num_steps"], self._counts["num_output_tokens"] - 1
            if steps > 0 and rest > 0:
                metrics.observe("request_time_per_output_token_seconds", (now - self._first) / rest)
                metrics.observe("request_acceptance_length", rest / steps)
            metrics.flush()

    def _send(self, finish_reason: str | None) -> None:
        tensors = self._tensors(finish_reason or "")
        try:
            self._sender.send(tensors, is_last=finish_reason is not None)
        except Exception as error:
            # Triton's shared memory may be full. Without a last response the client would wait for ever.
            self._sender.fail(INTERNAL, f"internal error: the answer cannot be sent: {error!r}")
            raise
        self._chunks = []

    def _tensors(self, finish_reason: str) -> Tensors:
        """The response by name, each tensor with a batch axis of size 1.

        ``text_output`` has no other axis, because clients of the TensorRT-LLM backend read
        ``as_numpy("text_output")[0].decode()``.
        """
        request, counts = self._request, self._counts
        pieces = [piece for chunk in self._chunks for piece in chunk.pieces]
        completion: Any = [piece.token_id for piece in pieces]
        if self._interface == TEXT:
            completion = "".join(piece.text for piece in pieces)
        if request.echo:
            completion = request.prompt + completion
        steps = counts["num_steps"]
        values: dict[str, Any] = {
            COMPLETIONS[self._interface].name: completion.encode() if self._interface == TEXT else completion,
            "sequence_index": [0],
            **{name: [count] for name, count in counts.items()},
            "acceptance_length": [(counts["num_output_tokens"] - 1) / steps if steps else 1.0],
            "finish_reason": [finish_reason.encode()],
        }
        if request.sampling.log_probs:
            log_probs = [piece.log_prob for piece in pieces if piece.log_prob is not None]
            self._cum_log_prob += sum(log_probs)
            values |= {"cum_log_probs": [self._cum_log_prob], "output_log_probs": log_probs}
            values["output_tokens"] = [piece.text.encode() for piece in pieces]
        if request.sampling.top_log_probs:
            values["token_scores"] = [scores_json(pieces, self._token_text).encode()]
        if request.prompt_log_probs:
            prompt = [piece for chunk in self._chunks for piece in chunk.prompt]
            values["prompt_scores"] = [scores_json(prompt, self._token_text).encode()]
        infos = {info.name: info for info in outputs_of(self._interface)}
        types = {name: NUMPY_TYPES[infos[name].triton_type] for name in values}
        return {name: np.array([value], types[name]) for name, value in values.items()}


def scores_json(pieces: Sequence[Piece], text_of: Callable[[int], str]) -> str:
    """Tokens as JSON: for each its text, its log-probability, and the most probable tokens with theirs.

    text_of: the text of one token
    """

    def finite(log_prob: float | None) -> float | None:
        return None if log_prob is None else max(log_prob, LEAST_LOG_PROB)

    rows = [
        [piece.text, finite(piece.log_prob), [[text_of(token), finite(value)] for token, value in piece.top]]
        for piece in pieces
    ]
    return json.dumps(rows)

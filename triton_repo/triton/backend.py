"""The Python backend's model: reads request tensors, submits requests to a scheduler, sends its chunks back.

It runs in tritonserver's stub process, which provides ``triton_python_backend_utils``.
"""

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from runtime.core.bundle import Bundle
from runtime.core.cli import num_nodes
from runtime.core.errors import DeviceError, RequestError, UserError
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Chunk, Piece
from runtime.decoder import SpeculativeDecoder
from runtime.serve.request import CancelledError, RequestFailure, UnavailableError
from runtime.serve.scheduler import Scheduler
from triton_repo.triton.heartbeat import Heartbeat, HeartbeatSender
from triton_repo.triton.limits import instance_device, max_num_seqs, switch
from triton_repo.triton.metrics import Metrics, RequestTimes
from triton_repo.triton.requests import (
    GenerateRequest,
    error_message,
    read_request,
    response_tensors,
    scores_json,
)
from triton_repo.triton.tensors import TEXT, check_tensors

LOGGER = logging.getLogger(__name__)
# Where the bundle is if config.pbtxt names none: this environment variable's value, or this directory.
BUNDLE_VARIABLE, DEFAULT_BUNDLE = "CTC_BUNDLE", "/engines"
WARM_UP_TOKENS = 8
# Seconds between two looks at whether the server runs, and seconds after which a stub that hangs is ended.
WATCH_SECONDS, STUCK_SECONDS = 1.0, 60.0
# A process whose steps fail so often, with none between them that does not, is started anew.
MAX_FAILED = 3
# Threads that wait for grammars to be compiled. The thread that takes requests does not wait for them.
NUM_READERS = 4
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers every request and ends every response stream with the final flag."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle and start the scheduler.

        Raises if the bundle or the configuration cannot be used, or if the device lacks memory; Triton then
        reports the model as not loaded, with the error's message.
        """
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._interface = parameters["interface"]
        check_tensors(config, self._interface)
        bundle = parameters["bundle"] or os.environ.get(BUNDLE_VARIABLE, DEFAULT_BUNDLE)
        manifest = Bundle.load(bundle, verify=False).manifest  # the decoder verifies the files
        self._decoder = SpeculativeDecoder.from_bundle(
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
        self._decoder.prompt_tokenizer.read_files()
        with suppress(RequestError):  # a request with a grammar is told why it cannot be served
            self._decoder.sequence_factory.grammars.prepare()
        _warm_up(self._decoder)
        self._scheduler = Scheduler(
            self._decoder,
            max_queue_size=int(parameters["max_queue_size"]),
            max_queue_tokens=int(parameters["max_queue_tokens"]),
            prefill_chunk_size=int(parameters["prefill_chunk_size"]),
        )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = metrics = Metrics(pb_utils, labels, self._scheduler)
        self._decoder.batch.runner.recorder = metrics
        self._scheduler.on_failure = metrics.add_failed_device
        self._scheduler.on_admit = lambda seconds: metrics.observe("request_queue_time_seconds", seconds)
        self._scheduler.start()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="reader")
        self._num_reading = 0
        self._lock = threading.Lock()
        self._model = args["model_name"]
        self._heartbeats = HeartbeatSender(self._heartbeat, self._scheduler.stop)
        threading.Thread(target=_exit_with, args=(os.getppid(),), name="watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests. Their responses are sent from the scheduler's thread."""
        for request in requests:
            self._try(self._submit, request, request.get_response_sender())

    def _try(self, work: Callable[[Any, Any], None], request: Any, sender: Any) -> None:
        """Do a part of a request's work; errors are its answer."""
        try:
            work(request, sender)
        except UnavailableError as error:
            self._metrics.add_failure("unavailable")
            _send_error(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
        except UserError as error:
            self._metrics.add_failure("invalid")
            _send_error(sender, error_message(self._interface, error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            LOGGER.exception("a request could not be read")
            self._metrics.add_failure("internal")
            _send_error(sender, f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)

    def finalize(self) -> None:
        """Finish the requests that were accepted, then stop the scheduler and free the device's memory.

        A model that is loaded again gets another process, which can use the device even if this one cannot.
        """
        self._heartbeats.close()
        self._readers.shutdown()
        self._scheduler.stop(drain=True)
        try:
            self._decoder.close()
        except DeviceError as error:
            LOGGER.error("the device failed as it was closed: %s", error)

    def is_ready(self) -> bool:
        """Whether requests can be served. Releases of Triton before March 2026 do not ask."""
        return self._scheduler.failure is None and not self._scheduler.has_crashed

    def _heartbeat(self) -> Heartbeat:
        scheduler = self._scheduler
        failure = "its scheduler has ended" if scheduler.has_crashed else None
        if scheduler.num_failed >= MAX_FAILED:
            failure = f"its last {scheduler.num_failed} steps failed; the log says why"
        if scheduler.failure is not None:
            failure = f"its device failed: {scheduler.failure}"
        count = scheduler.num_waiting + scheduler.num_running + self._num_reading
        return Heartbeat(self._model, os.getpid(), count, failure)

    def _submit(self, triton_request: Any, sender: Any) -> None:
        """Read a request and queue it. Another thread queues one with a grammar, which has to be compiled."""
        tensors = {tensor.name(): tensor.as_numpy() for tensor in triton_request.inputs()}
        request = read_request(self._interface, tensors)
        if request.grammar is None:
            self._queue(request, sender)
            return
        most = self._scheduler.max_queue_size
        if self._num_reading >= most:
            raise UnavailableError(f"queue: {most} requests wait for their grammars")
        with self._lock:
            self._num_reading += 1
        self._readers.submit(self._compile_and_queue, request, sender)

    def _compile_and_queue(self, request: GenerateRequest, sender: Any) -> None:
        try:
            self._try(self._queue, request, sender)
        finally:
            with self._lock:
                self._num_reading -= 1

    def _queue(self, request: GenerateRequest, sender: Any) -> None:
        prompt_ids = self._token_ids(request)
        room = max(self._decoder.max_length - len(prompt_ids), 1)
        sequence = self._decoder.new_sequence(
            prompt_ids,
            max_new_tokens=room if request.max_new_tokens is None else request.max_new_tokens,
            stop_token_ids=None if request.end_id is None else [request.end_id],
            stop_strings=request.stop_strings,
            sampling=request.sampling,
            prompt_log_probs=request.prompt_log_probs,
            grammar=request.grammar,
        )
        responder = Responder(
            self._interface, request, len(prompt_ids), sender, self._metrics, self._token_text
        )
        self._scheduler.submit(sequence, responder, sender.is_cancelled)

    def _token_text(self, token: int) -> str:
        return str(self._decoder.prompt_tokenizer.tokenizer.decode([token], skip_special_tokens=False))

    def _token_ids(self, request: GenerateRequest) -> list[int]:
        tokenizer, most = self._decoder.prompt_tokenizer, self._decoder.max_length
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


def _exit_with(parent: int) -> None:
    """End this process when the server has gone, which a server that was killed cannot do itself.

    A stub that was just sending a response then waits for the server while it holds the interpreter's lock,
    so no Python thread runs any more. faulthandler's timer needs no lock and ends the process in that case.
    """
    while os.getppid() == parent:
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        time.sleep(WATCH_SECONDS)
    os._exit(1)


class Responder:
    """Sends one request's responses: every chunk as it comes, or one response at the end.

    The scheduler's thread calls it with every chunk.
    """

    def __init__(
        self,
        interface: str,
        request: GenerateRequest,
        num_input_tokens: int,
        sender: Any,
        metrics: Metrics,
        token_text: Callable[[int], str],
    ):
        """token_text: the text of one token"""
        self._interface = interface
        self._metrics = metrics
        self._times = RequestTimes(metrics)
        self._stream = request.stream
        self._sender = sender
        self._num_input_tokens = num_input_tokens
        self._num_output_tokens = 0
        self._token_text = token_text
        # These six hold what has not been sent yet.
        self._texts = [request.prompt] if request.echo and isinstance(request.prompt, str) else []
        self._token_ids = list(request.prompt) if request.echo and not isinstance(request.prompt, str) else []
        self._log_probs: list[float] = []
        self._tokens: list[str] = []
        self._pieces: list[Piece] = []
        self._prompt: tuple[Piece, ...] = ()
        self._cum_log_prob = 0.0
        self._with_log_probs = request.sampling.log_probs
        self._with_top, self._with_prompt = request.sampling.top_log_probs > 0, request.prompt_log_probs
        # The first chunk comes from prefill and is not a step.
        self._num_steps = -1

    def __call__(self, result: Chunk | RequestFailure) -> None:
        if isinstance(result, RequestFailure):
            reason, kind = "internal", pb_utils.TritonError.INTERNAL
            if isinstance(result.error, UnavailableError):
                reason, kind = "unavailable", pb_utils.TritonError.UNAVAILABLE
            elif isinstance(result.error, CancelledError):
                reason, kind = "cancelled", pb_utils.TritonError.CANCELLED
            message = str(result.error)
            if isinstance(result.error, RequestError):
                reason, kind = "invalid", pb_utils.TritonError.INVALID_ARG
                message = error_message(self._interface, result.error)
            self._metrics.add_failure(reason)
            _send_error(self._sender, message, kind)
            return
        self._num_steps += 1
        self._num_output_tokens += len(result.pieces)
        self._times.add(len(result.pieces))
        self._texts.append(result.text)
        self._token_ids += result.token_ids
        if self._with_log_probs:
            self._log_probs += [piece.log_prob for piece in result.pieces if piece.log_prob is not None]
            self._tokens += [piece.text for piece in result.pieces]
        self._prompt += result.prompt
        if self._with_top:
            self._pieces += result.pieces
        if result.finish_reason:
            self._times.finish(result.finish_reason)
        if self._stream or result.finish_reason:
            self._send(result.finish_reason)

    def _send(self, finish_reason: str | None) -> None:
        self._cum_log_prob += sum(self._log_probs)
        tensors = response_tensors(
            self._interface,
            "".join(self._texts) if self._interface == TEXT else self._token_ids,
            log_probs=self._log_probs if self._with_log_probs else None,
            tokens=self._tokens,
            cum_log_prob=self._cum_log_prob,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_output_tokens,
            num_steps=self._num_steps,
            finish_reason=finish_reason,
            token_scores=scores_json(self._pieces, self._token_text) if self._with_top else None,
            prompt_scores=scores_json(self._prompt, self._token_text) if self._with_prompt else None,
            make=_tensor,
        )
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        try:
            self._sender.send(response, flags=FINAL if finish_reason else 0)
        except Exception as error:
            # Shared memory may be full. Without a final response the client would wait for ever.
            message = f"internal error: the answer cannot be sent: {error!r}"
            _send_error(self._sender, message, pb_utils.TritonError.INTERNAL)
            raise
        self._texts, self._token_ids, self._log_probs, self._tokens = [], [], [], []
        self._pieces, self._prompt = [], ()


def _tensor(name: str, array: NDArray[np.generic]) -> Any:
    return pb_utils.Tensor(name, array)


def _send_error(sender: Any, message: str, kind: Any) -> None:
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, kind))
    sender.send(response, flags=FINAL)

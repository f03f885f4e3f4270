"""The Python backend's model: tensors in, a scheduler's chunks out.

Runs inside tritonserver's stub process, where ``triton_python_backend_utils`` is.
"""

import faulthandler
import json
import logging
import os
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from runtime.decoder import AUTO, SpeculativeDecoder
from runtime.decoding.sampling import SamplingParams
from runtime.decoding.sequence import Chunk
from runtime.errors import UserError
from runtime.scheduling.request import CancelledError, RequestFailure, UnavailableError
from runtime.scheduling.scheduler import Scheduler
from triton_repo.config import BUNDLE_VARIABLE, DEFAULT_BUNDLE, check_tensors
from triton_repo.metrics import Metrics
from triton_repo.tensors import TEXT, GenerateRequest, answer_tensors, by_tensor, read_request

LOGGER = logging.getLogger(__name__)
WARM_UP_TOKENS = 8
WATCH_SECONDS, STUCK_SECONDS = 1.0, 60.0
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers every request, ends every stream with the final flag."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle; raises, and the model is not ready, where it or the configuration is unusable."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._interface = parameters["interface"]
        check_tensors(config, self._interface)
        if args["model_instance_kind"] == "GPU":
            # Before anything asks for a device: this instance's, of those the server sees, is the only one.
            visible, number = os.environ.get("CUDA_VISIBLE_DEVICES"), args["model_instance_device_id"]
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number)] if visible else number
        nodes = parameters["num_nodes"]
        self._decoder = SpeculativeDecoder.from_bundle(
            parameters["bundle"] or os.environ.get(BUNDLE_VARIABLE, DEFAULT_BUNDLE),
            method=parameters["method"] or None,
            num_nodes=nodes if nodes == AUTO else int(nodes),
            max_length=int(parameters["max_length"]) or None,
            num_rows=int(parameters["num_rows"]),
            num_threads=int(parameters["num_threads"]) or None,
        )
        _warm_up(self._decoder)
        self._scheduler = Scheduler(
            self._decoder,
            max_queue_size=int(parameters["max_queue_size"]),
            prompt_tokens=int(parameters["prompt_tokens"]),
        )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = Metrics(pb_utils, labels, self._scheduler)
        self._decoder.batch.recorder = self._metrics
        self._scheduler.start()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests; the scheduler's thread answers them."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except UnavailableError as error:
                _send_error(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
            except UserError as error:
                _send_error(sender, by_tensor(self._interface, error), pb_utils.TritonError.INVALID_ARG)
            except Exception as error:
                LOGGER.exception("a request could not be read")
                _send_error(sender, f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)

    def finalize(self) -> None:
        """End what is being decoded, then the thread."""
        self._scheduler.stop(drain=True)

    def _submit(self, request: Any, sender: Any) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        asked = read_request(self._interface, tensors)
        if isinstance(asked.prompt, str):
            prompt_ids = self._decoder.prompt_tokenizer.encode(
                asked.prompt, raw=asked.raw, max_tokens=self._decoder.max_length
            )
        else:
            prompt_ids = asked.prompt
        row = self._decoder.row(
            prompt_ids,
            max_new_tokens=asked.max_new_tokens,
            stop_token_ids=None if asked.end_id is None else [asked.end_id],
            stop_strings=asked.stop_strings,
            sampling=asked.sampling,
        )
        answer = Answer(self._interface, asked, len(prompt_ids), sender, self._metrics)
        self._scheduler.submit(row, answer, sender.is_cancelled)


def _warm_up(decoder: SpeculativeDecoder) -> None:
    """A few tokens, greedy and sampled, so that the first client does not wait for what runs only once."""
    count = min(WARM_UP_TOKENS, decoder.max_length - 1)
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=8, top_p=0.9, seed=0)):
        for _ in decoder.stream([0], max_new_tokens=count, stop_token_ids=(), sampling=sampling):
            pass


def _end_with(parent: int) -> None:
    """A server that was killed leaves this process behind: end it too.

    Where it was answering, the stub waits for the server with Python's lock in its hands, so that no thread
    runs: then faulthandler, which needs no lock, ends it.
    """
    while os.getppid() == parent:
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        time.sleep(WATCH_SECONDS)
    os._exit(1)


class Answer:
    """One request's responses: every chunk as it comes, or all of them at once."""

    def __init__(
        self, interface: str, asked: GenerateRequest, num_input_tokens: int, sender: Any, metrics: Metrics
    ):
        self._interface = interface
        self._metrics = metrics
        self._stream = asked.stream
        self._sender = sender
        self._num_input_tokens = num_input_tokens
        self._num_output_tokens = 0
        # Of what has not been sent yet.
        self._texts = [asked.prompt] if asked.echo and isinstance(asked.prompt, str) else []
        self._token_ids = list(asked.prompt) if asked.echo and not isinstance(asked.prompt, str) else []
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._with_log_probs = asked.sampling.log_probs
        # The first chunk comes from the prompt, every other one from a step.
        self._num_steps = -1

    def __call__(self, found: Chunk | RequestFailure) -> None:
        if isinstance(found, RequestFailure):
            kind = pb_utils.TritonError.INTERNAL
            if isinstance(found.error, UnavailableError):
                kind = pb_utils.TritonError.UNAVAILABLE
            elif isinstance(found.error, CancelledError):
                kind = pb_utils.TritonError.CANCELLED
            _send_error(self._sender, str(found.error), kind)
            return
        self._num_steps += 1
        self._num_output_tokens += len(found.pieces)
        self._metrics.add_tokens(len(found.pieces))
        self._texts.append(found.text)
        self._token_ids += found.token_ids
        self._log_probs += [piece.log_prob for piece in found.pieces if piece.log_prob is not None]
        if self._stream or found.finish_reason:
            self._send(found.finish_reason)

    def _send(self, finish_reason: str | None) -> None:
        self._cum_log_prob += sum(self._log_probs)
        tensors = answer_tensors(
            self._interface,
            "".join(self._texts) if self._interface == TEXT else self._token_ids,
            log_probs=self._log_probs if self._with_log_probs else None,
            cum_log_prob=self._cum_log_prob,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_output_tokens,
            num_steps=self._num_steps,
            finish_reason=finish_reason,
            make=_tensor,
        )
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        try:
            self._sender.send(response, flags=FINAL if finish_reason else 0)
        except Exception as error:
            # As when shared memory is full. Without an end the client would wait for ever.
            message = f"internal error: the answer cannot be sent: {error!r}"
            _send_error(self._sender, message, pb_utils.TritonError.INTERNAL)
            raise
        self._texts, self._token_ids, self._log_probs = [], [], []


def _tensor(name: str, array: NDArray[np.generic]) -> Any:
    return pb_utils.Tensor(name, array)


def _send_error(sender: Any, message: str, kind: Any) -> None:
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, kind))
    sender.send(response, flags=FINAL)

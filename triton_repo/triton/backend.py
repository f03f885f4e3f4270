"""The Python backend's model: passes Triton's requests to a ``ServedModel``, and its responses to Triton.

It runs in tritonserver's stub process, which provides ``triton_python_backend_utils``.
"""

import faulthandler
import json
import os
import threading
import time
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_repo.triton.model import ServedModel, Tensors
from triton_repo.triton.tensors import CANCELLED, INTERNAL, INVALID, UNAVAILABLE

# Seconds between two looks at whether the server runs, and seconds after which a stub that hangs is ended.
WATCH_SECONDS, STUCK_SECONDS = 1.0, 60.0
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Triton's names of the statuses. Its module gets the numbers after the model is imported.
ERROR_CODES = {
    INVALID: "INVALID_ARG",
    UNAVAILABLE: "UNAVAILABLE",
    CANCELLED: "CANCELLED",
    INTERNAL: "INTERNAL",
}


class TritonPythonModel:
    """Answers every request and ends every response stream with the final flag."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model.

        Raises if the bundle or the configuration cannot be used, or if the device lacks memory; Triton then
        reports the model as not loaded, with the error's message.
        """
        self._model = ServedModel(json.loads(args["model_config"]), args, _family)
        threading.Thread(target=_exit_with, args=(os.getppid(),), name="watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests. Their responses are sent from the scheduler's thread."""
        for request in requests:
            self._model.take(partial(_tensors, request), self._sender(request))

    def finalize(self) -> None:
        """Finish the requests that were accepted, and free the device's memory.

        A model that is loaded again gets another process, which can use the device even if this one cannot.
        """
        self._model.close()

    def is_ready(self) -> bool:
        """Whether requests can be served. Releases of Triton before March 2026 do not ask."""
        return self._model.is_ready

    def _sender(self, request: Any) -> "TritonSender":
        return TritonSender(request.get_response_sender())


class TritonSender:
    """A ``ResponseSender`` of one of Triton's requests. sender: Triton's"""

    def __init__(self, sender: Any):
        self._sender = sender
        self.arrived = time.monotonic()

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        response = pb_utils.InferenceResponse(output_tensors=outputs)
        self._sender.send(response, flags=FINAL if is_last else 0)

    def fail(self, reason: str, message: str) -> None:
        code = getattr(pb_utils.TritonError, ERROR_CODES[reason])
        error = pb_utils.TritonError(message, code)
        self._sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _tensors(request: Any) -> Tensors:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _family(name: str, description: str, kind: str) -> Any:
    return pb_utils.MetricFamily(
        name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind.upper())
    )


def _exit_with(parent: int) -> None:
    """End this process when the server has gone, which a server that was killed cannot do itself.

    A stub that was just sending a response then waits for the server while it holds the interpreter's lock,
    so no Python thread runs any more. faulthandler's timer needs no lock and ends the process in that case.
    """
    while os.getppid() == parent:
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        time.sleep(WATCH_SECONDS)
    os._exit(1)

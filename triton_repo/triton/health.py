"""Whether the models can serve, and the heartbeats from which the launcher knows it.

Model processes send a heartbeat over a Unix socket twice a second. A process that ends closes its connection,
and one that hangs falls silent. The other way, the launcher asks its model processes to take no more
requests, and they tell it when the others have ended. Messages are lines of JSON.
"""

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger(__name__)
LOADING = "the models are being loaded"


@dataclass
class Health:
    """Whether the models can serve, and if not, why.

    problem: why no model can serve at the moment; None if they can
    failed: the models that did not load, each with the reason
    num_requests: requests that are being answered over HTTP
    """

    problem: str | None = LOADING
    failed: Mapping[str, str] = field(default_factory=dict)
    num_requests: int = 0

    def problem_of(self, model: str) -> str | None:
        """Why this model cannot serve; None if nothing is known against it."""
        if self.problem is None and model in self.failed:
            return f"{model} did not load: {self.failed[model]}"
        return self.problem

    @property
    def any_problem(self) -> str | None:
        """Why not all models can serve."""
        return next(filter(None, [self.problem, *map(self.problem_of, self.failed)]), None)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def failed_models(index: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Those of the models that failed to load, each with the reason, from Triton's repository index.

    Their state is UNAVAILABLE. A model that is still loading has the state LOADING, or no state yet.
    """
    failed = (model for model in index if model["name"] in names and model.get("state") == "UNAVAILABLE")
    return {model["name"]: one_line(model.get("reason", "")) for model in failed}


def one_line(reason: str) -> str:
    """A model's reason, without what Triton puts before and behind a Python exception's message."""
    return re.sub(r"^(Internal|Invalid argument): (\w+: )?", "", reason.strip().partition("\n")[0])


# The environment variable that holds the socket's path. Without it nobody listens.
VARIABLE = "CTC_HEARTBEAT"
# Seconds between two heartbeats.
INTERVAL = 0.5
DRAIN = b"drain\n"
# The connections of processes that have been killed are closed within this time.
CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class Heartbeat:
    """The state of a model process.

    pid: the model process
    num_requests: requests that it decodes or holds in its queue
    failure: why it serves no request any more, such as a device that failed; None if it serves
    is_drained: whether it takes no more requests, and all others have ended
    is_leaving: whether Triton has unloaded the model, after which the process ends as it should
    """

    model: str
    pid: int
    num_requests: int
    failure: str | None = None
    is_drained: bool = False
    is_leaving: bool = False


class HeartbeatSender:
    """The model process's side: a thread that sends heartbeats. It does nothing without a launcher."""

    def __init__(self, state: Callable[[], Heartbeat], on_drain: Callable[[], None]):
        """
        state: the heartbeat to send now
        on_drain: called in a thread of its own when no more requests are wanted; returns when all have ended
        """
        self._state, self._on_drain = state, on_drain
        self._drained, self._ended = threading.Event(), threading.Event()
        # Lines of two threads must not mix.
        self._sending = threading.Lock()
        path = os.environ.get(VARIABLE)
        if path is None:
            return
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.settimeout(INTERVAL)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Say that the process ends as it should."""
        self._ended.set()
        if hasattr(self, "_socket"):
            with suppress(OSError):
                self._send()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._send()
                received = self._socket.recv(len(DRAIN))
            except TimeoutError:
                continue
            except OSError:
                return
            if not received:
                return  # the launcher has gone, and its guard ends this process
            threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        self._on_drain()
        self._drained.set()
        with suppress(OSError):
            self._send()

    def _send(self) -> None:
        drained, leaving = self._drained.is_set(), self._ended.is_set()
        heartbeat = replace(self._state(), is_drained=drained, is_leaving=leaving)
        with self._sending:
            self._socket.sendall(json.dumps(asdict(heartbeat)).encode() + b"\n")


@dataclass(eq=False)
class ModelProcess:
    """One model process, as the launcher knows it.

    last: its last heartbeat
    num_missed: how often ``tick`` was called since then
    """

    last: Heartbeat
    writer: asyncio.StreamWriter
    num_missed: int = 0

    @property
    def name(self) -> str:
        return f"the process {self.last.pid} of {self.last.model}"

    def drain(self) -> None:
        """Ask the process to take no more requests."""
        with suppress(OSError):
            self.writer.write(DRAIN)


class HeartbeatListener:
    """The launcher's side: the model processes that live."""

    def __init__(self, path: Path, on_fault: Callable[[str], None]):
        """path: of the socket; on_fault: called with what happened to a process"""
        self.processes: set[ModelProcess] = set()
        self._num_open = 0
        self._path, self._on_fault = path, on_fault

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._follow, self._path)

    async def forget(self) -> None:
        """Forget the processes, which have been killed, when their connections are closed."""
        self.processes.clear()
        end = time.monotonic() + CLOSE_SECONDS
        while self._num_open and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def tick(self, most_missed: int) -> None:
        """Call it every ``INTERVAL`` seconds: a process that misses more heartbeats than this hangs.

        Calls are counted instead of seconds, so a launcher that was itself stopped does not blame others.
        """
        for process in self.processes:
            process.num_missed += 1
            if process.num_missed > most_missed:
                seconds = process.num_missed * INTERVAL
                self._on_fault(f"{process.name} hangs: no heartbeat for {seconds:g} seconds")

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process: ModelProcess | None = None
        self._num_open += 1
        try:
            while line := await reader.readline():
                heartbeat = Heartbeat(**json.loads(line))
                if process is None:
                    process = ModelProcess(heartbeat, writer)
                    self.processes.add(process)
                process.last, process.num_missed = heartbeat, 0
                if heartbeat.failure is not None and process in self.processes:
                    self._on_fault(f"{process.name} cannot serve any more: {heartbeat.failure}")
        except (OSError, ValueError):
            LOGGER.exception("a model process sent a heartbeat that cannot be read")
        finally:
            writer.close()
            self._num_open -= 1
            if process is not None and process in self.processes:
                self.processes.discard(process)
                if not process.last.is_leaving:
                    self._on_fault(f"{process.name} has ended")

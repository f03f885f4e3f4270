"""Keep a tritonserver or a worker of ours running, and know at any moment whether its models can serve.

Triton 2.51 does not notice a model process that has died or hangs: it stays "ready", and its streams wait for
ever. So the launcher watches the model processes itself (``heartbeat``). If one of them fails, the whole
tritonserver is killed, which ends all streams at once, and is started anew.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from triton_repo.triton.guard import HEARTBEAT
from triton_repo.triton.health import INTERVAL, VARIABLE, Health, HeartbeatListener, failed_models
from triton_repo.triton.log import STOPPED_EARLY, TRITONSERVER, say, write
from triton_repo.triton.server import DRAIN_SECONDS, ROOT

# Models that take longer than this to load have failed.
READY_SECONDS = 600.0
# A model process that sends no heartbeat for so long hangs, and so does a tritonserver that does not answer.
HANG_SECONDS = 3.0
# The last answers of the model processes reach clients of gRPC within this time.
FLUSH_SECONDS = 1.0
# Seconds between an attempt to load the models anew that failed and the next one.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
POLL_SECONDS = 0.2
UNKNOWN_REASON = "the server's log says why"


class Supervisor:
    """One server at a time, which is started anew whenever it or one of its model processes fails.

    health: what it knows, for everybody who answers requests
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        directory: Path,
        names: list[str],
        client: aio.InferenceServerClient,
        health: Health,
        ready: str,
        server: str = TRITONSERVER,
    ):
        """
        command: the server's, with the environment that it needs
        directory: the launcher's own, removed with it
        names: the models that have to be served
        client: a connection to the server
        ready: the line that says what is served where
        server: what it is called in the log
        """
        self.health = health
        self._command, self._environment, self._directory = command, dict(environment), directory
        self._names, self._client, self._ready, self._server = names, client, ready, server
        self._listener = HeartbeatListener(directory / HEARTBEAT, self._report)
        self._guard: Process | None = None
        # Models that could not be loaded when the launcher started, each with the reason.
        self._failed: Mapping[str, str] = {}
        # What happened to the running server or to a model process; set once for each start of the server.
        self._fault: str | None = None
        # Set by a fault and by ``stop``, and by ``stop`` alone.
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._ended = asyncio.Event()
        self._num_signals = 0

    def stop(self) -> None:
        """Take no more requests; ``run`` returns when the others have ended. A second call ends them."""
        self._num_signals += 1
        self._changed.set()
        self._stopping.set()

    async def run(self) -> int:
        """Serve until ``stop`` is called; returns the exit status: 0, or 1 if no model can be served."""
        await self._listener.start()
        try:
            problem = await self._start_first()
            if problem is None:
                while (fault := await self._watch()) is not None:
                    await self._start_anew(fault)
                await self._drain()
        finally:
            await self._end()
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                await self._guard.wait()
        # The last line in the log, since nothing runs any more that writes to it.
        say(problem or "stopped")
        return 0 if self._num_signals else 1

    async def _start_first(self) -> str | None:
        """Load the models, and say which cannot be served; returns why the server has to end, if it has."""
        failed = await self._load()
        if self._num_signals:
            return STOPPED_EARLY
        if self._fault is not None:
            return f"{self._fault} before it was ready; its log above says why"
        self._names = [name for name in self._names if name not in failed]
        serves = bool(self._names) or await self._serves_others(failed)
        if serves:
            self.health.problem, self.health.failed = None, failed
            self._failed = failed
        for name, reason in failed.items():
            say(f"{name} did not load: {reason}")
        if not serves:
            return "no model can be served, so the server ends"
        if not failed:
            write(self._ready, {"event": "ready", "message": self._ready})
        return None

    async def _start_anew(self, fault: str) -> None:
        """Replace the server, as often as it takes until all models that were served are served again."""
        began, pause = time.monotonic(), FIRST_PAUSE
        self.health.problem = f"{fault}; the server is being started anew, so try again"
        say(f"{fault}; the server is started anew")
        if not self._ended.is_set():
            # Those whose requests met the fault hear of it before their connections close.
            await self._pause(FLUSH_SECONDS, self._stopping)
        while not self._num_signals:
            await self._end()
            failed = await self._load()
            if self._num_signals:
                return
            if not failed and self._fault is None:
                self.health.problem, self.health.failed = None, self._failed
                say(f"ready again after {time.monotonic() - began:.1f} seconds")
                return
            (name, reason), *_ = [*failed.items(), (self._server, self._fault or UNKNOWN_REASON)]
            self.health.problem = f"{name} did not load: {reason}"
            say(f"{name} did not load: {reason}; the next attempt is in {pause:g} seconds")
            await self._pause(pause, self._stopping)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _load(self) -> dict[str, str]:
        """Start the server and wait until every model has loaded or failed to; returns why some failed.

        Returns early if the server ends, which is then the fault, or if ``stop`` is called.
        """
        await self._listener.forget()
        self._fault = None
        self._changed.clear()
        self._ended.clear()
        await self._command_guard("start")
        loading, failed = set(self._names), dict[str, str]()
        end = time.monotonic() + READY_SECONDS
        while loading and self._fault is None and not self._num_signals:
            if time.monotonic() > end:
                late = f"it did not load within {READY_SECONDS:g} seconds"
                return {**failed, **dict.fromkeys(loading, late)}
            with suppress(InferenceServerException):
                failed |= failed_models(await self._index(), self._names)
                for name in loading - failed.keys():
                    if await self._client.is_model_ready(name, client_timeout=HANG_SECONDS):
                        loading.discard(name)
                loading -= failed.keys()
            if loading:
                await self._pause(POLL_SECONDS)
        return {name: reason or UNKNOWN_REASON for name, reason in failed.items()}

    async def _watch(self) -> str | None:
        """Wait for a fault, which is returned, or for ``stop``, which is None."""
        most_missed = round(HANG_SECONDS / INTERVAL)
        asking = asyncio.create_task(self._ask_server())
        try:
            while self._fault is None and not self._num_signals:
                await self._pause(INTERVAL)
                self._listener.tick(most_missed)
        finally:
            asking.cancel()
        return None if self._num_signals else self._fault

    async def _ask_server(self) -> None:
        """Report a server that does not answer although its model processes live."""
        while True:
            try:
                await self._client.is_server_live(client_timeout=HANG_SECONDS)
            except InferenceServerException as error:
                # If a process has ended, the end of its heartbeats says so in the meantime.
                await asyncio.sleep(INTERVAL)
                self._report(f"{self._server} does not answer: {error.message()}")
            await asyncio.sleep(INTERVAL)

    async def _drain(self) -> None:
        """Let the requests end that have been accepted, and refuse all others."""
        self.health.problem = "the server is shutting down and takes no more requests"
        processes = self._listener.processes
        for process in processes:
            process.drain()
        say(f"stopping: the running requests have {DRAIN_SECONDS} seconds to end, and no more are taken")
        end = time.monotonic() + DRAIN_SECONDS
        while not self._is_drained and time.monotonic() < end:
            if self._fault is not None:
                say(f"{self._fault} as the server was stopping")
                return
            if self._num_signals > 1:
                break
            await asyncio.sleep(POLL_SECONDS)
        if self._is_drained:
            await asyncio.sleep(FLUSH_SECONDS)
        else:
            decoded = sum(process.last.num_requests for process in processes)
            say(f"{max(decoded, self.health.num_requests)} requests had not ended and are ended now")

    @property
    def _is_drained(self) -> bool:
        """Whether all requests have ended: those of the model processes, and those answered over HTTP."""
        drained = all(process.last.is_drained for process in self._listener.processes)
        return drained and not self.health.num_requests

    async def _end(self) -> None:
        """Kill the server with its model processes. Triton 2.51 may crash where it is asked to stop."""
        if self._guard is not None and not self._ended.is_set():
            await self._command_guard("kill")
            await self._ended.wait()

    async def _command_guard(self, command: str) -> None:
        """Give the guard a command; a guard that was killed is replaced."""
        if self._guard is None or self._guard.returncode is not None:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "triton_repo.triton.guard", str(self._directory), *self._command),
                env={**self._environment, VARIABLE: str(self._directory / HEARTBEAT)},
                cwd=os.fspath(ROOT),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
            )
            self._following = asyncio.create_task(self._follow(self._guard))
        assert self._guard.stdin is not None
        with suppress(ConnectionError):
            self._guard.stdin.write(f"{command}\n".encode())
            await self._guard.stdin.drain()

    async def _follow(self, guard: Process) -> None:
        """Read what the guard says of the servers that end."""
        assert guard.stdout is not None
        while line := await guard.stdout.readline():
            status = int(line.split()[1])
            self._ended.set()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._report(f"{self._server} ended with {how}")
        await guard.wait()
        self._ended.set()
        self._report(f"the process that holds {self._server} has ended")

    def _report(self, fault: str) -> None:
        self._fault = self._fault or fault
        self._changed.set()

    async def _pause(self, seconds: float, event: asyncio.Event | None = None) -> None:
        """Wait, but not longer than until the event, or until a fault or ``stop``."""
        with suppress(TimeoutError):
            await asyncio.wait_for((event or self._changed).wait(), seconds)

    async def _index(self) -> list[dict[str, Any]]:
        """Triton's repository index: the models with their states."""
        answer = await self._client.get_model_repository_index(client_timeout=HANG_SECONDS, as_json=True)
        return list(answer.get("models", []))

    async def _serves_others(self, failed: Mapping[str, str]) -> bool:
        """Whether there are other models, of a repository of the user's, that did not fail.

        A server that does not answer has none.
        """
        try:
            index = await self._index()
        except InferenceServerException:
            return False
        return any(model["name"] not in failed and model.get("state") != "UNAVAILABLE" for model in index)

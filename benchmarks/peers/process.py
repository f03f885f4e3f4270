"""The comparison's side of a worker: starts its process, asks and reads the answers."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engine import Opening
from runtime.core.errors import UserError

COMMAND = (sys.executable, "-m", "benchmarks.peers.worker")
SECONDS_TO_END = 10


class WorkerError(UserError):
    """An engine that cannot run; the message is its last word."""


class Worker:
    """A process with an open model. ``close`` ends it."""

    def __init__(self, opening: Opening, log: Path, command: Sequence[str] = COMMAND):
        """log: file of what the engine prints. Raises WorkerError if the model cannot be opened."""
        self.opening = opening
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True
            )
        try:
            self.version = str(self._ask({"open": dataclasses.asdict(opening)})["version"])
        except BaseException:
            self.close()
            raise

    def decode(self, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Decode one prompt and return the worker's answer. Raises WorkerError."""
        return self._ask({"decode": {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens}})

    def close(self) -> None:
        """End the process, which loses nothing."""
        process = self._process
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(OSError):  # it has ended with a request unread
            process.stdin.close()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise WorkerError(f"its process has ended; {self._log} has what it printed")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

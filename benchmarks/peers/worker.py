"""One engine with one model in a process of its own, driven line by line.

The comparison writes a JSON object a line to the worker's stdin and reads one a line from its stdout:

    {"convert": {...}}                                  -> {}
    {"open": {...}}                                     -> {"version": ..., "resident_mb": ...}
    {"decode": {"prompt_ids": [...], "max_new_tokens": N}}
        -> {"token_ids": [...], "first": F, "prompt_ms": ..., "decode_ms": ..., "resident_mb": ...}

``convert`` holds the arguments of ``_convert``, ``open`` the fields of ``Opening``. The first F tokens came
together when the prompt had been read: one, or several where drafts were verified with the prompt.
``decode_ms`` begins when they came and ends with the last token. What fails is answered with {"error": ...},
and the worker ends. A worker also ends with its stdin. Libraries that print to stdout print to stderr
instead.

``Worker`` is the comparison's side: it starts the process, asks and reads the answers.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.engines import ENGINES, Decode, Engine, Opening
from runtime.core.errors import UserError

COMMAND = (sys.executable, "-m", "benchmarks.peers.worker")
SECONDS_TO_END = 10


class WorkerError(UserError):
    """An engine that cannot run; the message is its last word."""


class Worker:
    """A process that converts a model, or opens one and decodes. ``close`` ends it."""

    def __init__(self, log: Path, command: Sequence[str] = COMMAND):
        """log: file of what the engine prints"""
        self.version = ""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True
            )

    def convert(self, engine: Engine, model: Path, out: Path, precision: str, flags: Sequence[str]) -> None:
        """Write an engine's files into the empty directory ``out``. Raises WorkerError."""
        names = {"engine": engine.name, "model": str(model), "out": str(out), "form": engine.forms[precision]}
        self._ask({"convert": {**names, "flags": list(flags)}})

    def open(self, opening: Opening) -> None:
        """Open a model. Raises WorkerError."""
        self.version = str(self._ask({"open": dataclasses.asdict(opening)})["version"])

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


STATUS = Path("/proc/self/status")


class Clock:
    """Receives tokens and keeps the times of the first and the last that count."""

    def __init__(self, max_new_tokens: int):
        self.token_ids: list[int] = []
        self.first = 0
        self._max_new_tokens = max_new_tokens
        self._begin = self._first_ns = self._end = time.perf_counter_ns()

    def receive(self, token_ids: Sequence[int]) -> None:
        """Keep tokens, without those beyond the number that was asked for."""
        kept = list(token_ids)[: self._max_new_tokens - len(self.token_ids)]
        if not kept:
            return
        self._end = time.perf_counter_ns()
        if not self.token_ids:
            self.first, self._first_ns = len(kept), self._end
        self.token_ids += kept

    def answer(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids,
            "first": self.first,
            "prompt_ms": (self._first_ns - self._begin) / 1e6,
            "decode_ms": (self._end - self._first_ns) / 1e6,
            "resident_mb": resident_mb(),
        }


def resident_mb() -> float | None:
    """Resident memory of this process in 10^6 bytes, mapped files included; None where it is unknown."""
    if not STATUS.is_file():
        return None
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    found = next((line.split()[1] for line in lines if line.startswith("VmRSS:")), None)
    return None if found is None else round(int(found) * 1024 / 1e6, 1)


def serve(requests: TextIO, answers: TextIO) -> int:
    """Answer requests until there are no more; 1 after a failure."""
    decode: Decode | None = None
    for line in requests:
        try:
            request = json.loads(line)
            answer: Mapping[str, Any] = {}
            if "convert" in request:
                _convert(**request["convert"])
            elif "open" in request:
                opening = Opening(**request["open"])
                engine = ENGINES[opening.engine]
                decode = engine.open_model(opening)
                answer = {"version": engine.version(), "resident_mb": resident_mb()}
            elif decode is None:
                raise ValueError("no model is open")
            else:
                clock = Clock(request["decode"]["max_new_tokens"])
                decode(request["decode"]["prompt_ids"], request["decode"]["max_new_tokens"], clock.receive)
                answer = clock.answer()
        except Exception as error:  # any library's
            text = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            _write(answers, {"error": f"{kind}{text[-1]}"})
            return 1
        _write(answers, answer)
    return 0


def _convert(engine: str, model: str, out: str, form: str, flags: list[str]) -> None:
    ENGINES[engine].convert(Path(model), Path(out), form, flags)


def _write(stream: TextIO, answer: Mapping[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def main() -> int:
    # The answers get stdout for themselves.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return serve(sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())

"""Faults of a server under load: whether every stream ends with a reason, and the server serves again.

    python -m benchmarks.load.chaos --bundle engines/ --rounds 20 --server own --out build/chaos

Clients of all interfaces ask for long texts without pause. In every round one thing fails, in turn: the
process with the model is killed, stopped, or gets no more memory; a file of the bundle is emptied; the
launcher is killed. At the end the server is stopped while clients stream and others keep idle connections.
The bundle is copied first. Writes chaos.json and chaos.md with a row for every round; exits with 1 if a limit
was not kept.
"""

import argparse
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tqdm import tqdm
from tritonclient import grpc

from benchmarks.arguments import Parser
from benchmarks.load.clients import PATIENCE, Load, model_process, wait_for_readiness
from benchmarks.report import markdown_table, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.decoder import SpeculativeDecoder
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.process import ServerProcess
from triton_repo.triton.server import OWN, TRITON
from triton_repo.triton.supervisor import DRAIN_SECONDS

# Seconds within which streams have to end, the server has to say that it is not ready, and nothing may be
# left of a launcher; and what a restart may take beyond the first start.
ENDED, NOT_READY, LEFT_BEHIND, RESTART = 10.0, 5.0, 10.0, 5.0
QUESTION, NUM_TOKENS = "How many?", 16


@dataclass
class Round:
    """What one fault did, in seconds after it.

    not_ready_after: None where the server has gone on
    ready_after: after the cause is gone; None where the server has gone on
    """

    fault: str
    streams_end_after: float
    not_ready_after: float | None
    ready_after: float | None
    problems: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a limit was not kept, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.load.chaos", __doc__)
    parser.add("--bundle", "--threads")
    parser.add("--rounds", type=at_least(1), default=20, help="faults, one after another (default 20)")
    parser.add("--clients", type=at_least(1), default=2, help="of each interface (default 2)")
    parser.add("--server", choices=(OWN, TRITON), default=OWN, help="which server (default own)")
    parser.add("--out", help="directory of chaos.json and chaos.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Let things fail, write and print the report; 1 if a limit was not kept."""
    decoder = SpeculativeDecoder.from_bundle(args.bundle, num_threads=args.threads)
    chunks = decoder.stream(decoder.prompt_tokenizer.encode(QUESTION), max_new_tokens=NUM_TOKENS)
    expected = "".join(chunk.text for chunk in chunks)
    rounds = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        bundle = Path(shutil.copytree(args.bundle, Path(scratch) / "bundle"))

        def start() -> tuple[ServerProcess, float]:
            began = time.monotonic()
            options = ("--server", args.server, "--threads", str(args.threads or 0))
            server = ServerProcess(bundle, Path(scratch) / "log", *options)
            running.callback(server.process.kill)
            return server, wait_for_readiness(server, True) - began

        server, load_seconds = start()
        for number in tqdm(range(args.rounds), desc="faults", unit="fault"):
            name = list(FAULTS)[number % len(FAULTS)]
            fault = FAULTS[name]
            if fault is None:
                found, server = _launcher_round(name, server, args.clients, start)
            else:
                found = _model_round(name, server, fault, bundle, args.clients)
            _check(found, load_seconds)
            if (text := _text(server)) != expected:
                found.problems.append(f"the text is {text!r} afterwards, expected {expected!r}")
            rounds.append(found)
        stop_seconds, status = _stop(server, args.clients)
    rows = []
    for each in rounds:
        seconds = (each.streams_end_after, each.not_ready_after, each.ready_after)
        cells = ["-" if value is None else f"{value:.1f}" for value in seconds]
        rows.append([each.fault, *cells, "; ".join(each.problems) or "kept"])
    header = ["fault", "streams have ended after, s", "not ready after, s", "ready again after, s", "limits"]
    table = markdown_table(header, rows)
    stopped = f"SIGTERM under load: status {status} after {stop_seconds:.1f} s; "
    stopped += f"the first start took {load_seconds:.1f} s"
    report = {
        "rounds": [vars(each) for each in rounds],
        "load_seconds": load_seconds,
        "stopped_after": stop_seconds,
        "exit_status": status,
    }
    texts = {"chaos.md": f"{table}\n\n{stopped}\n"}
    write_report(args, "chaos.json", report, bundle=Bundle.load(args.bundle, verify=False), texts=texts)
    print(f"{table}\n\n{stopped}")
    return int(status != 0 or stop_seconds > DRAIN_SECONDS + RESTART or any(each.problems for each in rounds))


def _limit_memory(process: psutil.Process, weights: Path) -> None:
    """Memory that the process asks for from now on is refused.

    A library may end the process then. Otherwise it goes on with texts that need no longer cache.
    """
    process.rlimit(psutil.RLIMIT_AS, (1 << 20, _largest_limit(process)))


def _largest_limit(process: psutil.Process) -> int:
    """The memory that the process may be allowed to ask for again."""
    return process.rlimit(psutil.RLIMIT_AS)[1]


def _empty_file(process: psutil.Process, weights: Path) -> None:
    """The process reads its weights from this file, and is killed at the next part that it has not read."""
    weights.write_bytes(b"")


Fault = Callable[[psutil.Process, Path], None]
# None stands for the launcher, which the supervisor is a part of.
FAULTS: dict[str, Fault | None] = {
    "the model's process is killed": lambda process, _: process.kill(),
    "the model's process is stopped": lambda process, _: process.suspend(),
    "the model's process gets no more memory": _limit_memory,
    "a file of the bundle is emptied": _empty_file,
    "the launcher is killed": None,
}


def _model_round(name: str, server: ServerProcess, fault: Fault, bundle: Path, clients: int) -> Round:
    """A fault of the process with the model, which the supervisor has to see."""
    process, weights = model_process(server), bundle / "backbone.onnx.data"
    content = weights.read_bytes()
    with Load(server, clients) as load:
        began = time.monotonic()
        fault(process, weights)
        if fault is _limit_memory and _goes_on(process):
            process.rlimit(psutil.RLIMIT_AS, (_largest_limit(process),) * 2)
            not_ready, ended = None, load.last_end_so_far(began)
        else:
            not_ready, ended = wait_for_readiness(server, False), load.last_end()
    gone = time.monotonic()
    if weights.stat().st_size != len(content):
        weights.write_bytes(content)
    ready = wait_for_readiness(server, True)
    found = Round(name, ended - began, None, None)
    if not_ready is not None:
        found.not_ready_after, found.ready_after = not_ready - began, ready - max(gone, not_ready)
    found.problems += _cut_off(load)
    return found


def _goes_on(process: psutil.Process) -> bool:
    """Whether a process still runs after ``ENDED`` seconds."""
    try:
        process.wait(ENDED)
    except psutil.TimeoutExpired:
        return True
    return False


def _cut_off(load: Load) -> list[str]:
    """The problem that streams ended without a word, if some did."""
    return [f"{load.num_cut_off} streams ended without a word"] if load.num_cut_off else []


def _launcher_round(
    name: str, server: ServerProcess, clients: int, start: Callable[[], tuple[ServerProcess, float]]
) -> tuple[Round, ServerProcess]:
    """A launcher that is killed, and a new one; nothing may be left of the first."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    with Load(server, clients) as load:
        began = time.monotonic()
        server.process.kill()
        server.process.wait()
        alive = psutil.wait_procs(processes, timeout=LEFT_BEHIND)[1]
        gone = time.monotonic()
        ended = load.last_end()
    found = Round(name, ended - began, gone - began, 0.0)
    found.problems += _cut_off(load)
    found.problems += [f"process {process.pid} is left" for process in alive]
    for port in (server.http_port, server.grpc_port, server.metrics_port, server.openai_port):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            found.problems.append(f"port {port} is still taken")
    server, found.ready_after = start()
    return found, server


def _check(found: Round, load_seconds: float) -> None:
    """Note which limits were not kept."""
    for what, value, most in (
        ("streams have ended", found.streams_end_after, ENDED),
        ("not ready", found.not_ready_after, NOT_READY),
        ("ready again", found.ready_after, load_seconds + RESTART),
    ):
        if value is not None and value > most:
            found.problems.append(f"{what} after {value:.1f} s, expected at most {most:.1f}")


def _text(server: ServerProcess) -> str:
    with grpc.InferenceServerClient(server.url) as client:
        options = {"text_input": QUESTION, "max_tokens": NUM_TOKENS, "stream": True}
        return b"".join(response["text_output"][0] for response in stream(client, options)).decode()


def _stop(server: ServerProcess, clients: int) -> tuple[float, int]:
    """Seconds until a server has ended that is stopped under load, and its status."""
    with ExitStack() as idle, Load(server, clients) as load:
        for port in (server.http_port, server.openai_port, server.grpc_port):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        threading.Timer(1.0, load.stop).start()
        status = server.process.wait(PATIENCE)
        return time.monotonic() - began, status


if __name__ == "__main__":
    raise SystemExit(main())

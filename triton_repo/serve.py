"""Serve an engine bundle through Triton.

    python -m triton_repo.serve --bundle engines/
    python -m triton_repo.client "How many days are there in four weeks?"
    curl -d '{"text_input": "How many?", "max_tokens": 32}' localhost:8000/v2/models/ctc_llm/generate

Options that are not listed go to tritonserver as they are, such as --grpc-use-ssl=true or --log-verbose=1.
It listens on this machine alone unless --host says otherwise; neither TLS nor authentication is on.
"""

import argparse
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType

from runtime.bundle import Bundle
from runtime.decoder import AUTO
from runtime.errors import UserError
from runtime.load import METHODS
from runtime.scheduling.scheduler import DEFAULT_MAX_QUEUE_SIZE, DEFAULT_PREFILL_CHUNK_SIZE
from triton_repo.config import DEFAULT_MAX_NUM_SEQS, MODEL, PLAIN_MODEL, TOKENS_MODEL
from triton_repo.server import environment, find_server, write_backend, write_repository

READY_TIMEOUT = 600.0
# Seconds that running requests get to end after SIGTERM.
DRAIN_SECONDS = 30
# Requests for these open or write files, and no client of ours needs them.
RESTRICTED = "shared-memory,trace,logging"


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m triton_repo.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle directory")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--http-port", type=int, default=8000, help="default %(default)s")
    add("--grpc-port", type=int, default=8001, help="default %(default)s")
    add("--metrics-port", type=int, default=8002, help="default %(default)s")
    add("--method", choices=METHODS, help="default: draft where the bundle has a draft head")
    add("--num-nodes", default=AUTO, help="drafts a request and step (default %(default)s: what pays)")
    add(
        "--max-num-seqs",
        type=int,
        default=DEFAULT_MAX_NUM_SEQS,
        help="requests at a time (default %(default)s)",
    )
    add("--max-length", type=int, help="tokens of a prompt and its output (default: the model's context)")
    add(
        "--max-queue-size",
        type=int,
        default=DEFAULT_MAX_QUEUE_SIZE,
        help="requests in the queue, others are refused (default %(default)s)",
    )
    add(
        "--prefill-chunk-size",
        type=int,
        default=DEFAULT_PREFILL_CHUNK_SIZE,
        help="of a prompt, read at a time between two steps of the others (default %(default)s)",
    )
    add("--threads", type=int, default=0, help="of an engine (default: all cores)")
    add(
        "--num-instances",
        type=int,
        default=1,
        help="processes a model, each with engines, rows and a queue of its own (default %(default)s)",
    )
    add(
        "--gpus",
        type=_devices,
        default=[],
        help="such as 0,1: that many instances on each of these, which sees no other",
    )
    add("--plain", action="store_true", help=f"serve {PLAIN_MODEL} too: without the draft head")
    add("--tokens", action="store_true", help=f"serve {TOKENS_MODEL} too: tokens in, tokens out")
    return parser.parse_known_args(argv)


def _devices(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"must be GPU numbers such as 0,1, got {text!r}")
    return [int(number) for number in numbers]


def main(argv: list[str] | None = None) -> int:
    """Command line; the server's exit status, or 2 for what cannot be used."""
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        for name in ("num_rows", "max_queue_size", "prompt_tokens", "num_instances"):
            if getattr(args, name) < 1:
                raise UserError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(args, name)}")
        if args.max_length is not None and args.max_length < 2:
            raise UserError(f"--max-length: must be at least 2, got {args.max_length}")
        Bundle.load(args.bundle, verify=False)  # the model verifies the files
        with tempfile.TemporaryDirectory(prefix="ctc-speculator-") as directory:
            return serve(args, rest, Path(directory))
    except UserError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2


def serve(args: argparse.Namespace, rest: list[str], directory: Path) -> int:
    """Write the repository, run the server until it ends; SIGTERM and SIGINT are passed on to it."""
    installation = find_server()
    # Each loads engines of its own.
    names = [MODEL, *([PLAIN_MODEL] if args.plain else []), *([TOKENS_MODEL] if args.tokens else [])]
    parameters = {
        "bundle": str(args.bundle.resolve()),
        "method": args.method or "",
        "num_nodes": str(args.num_nodes),
        "num_rows": str(args.num_rows),
        "max_length": str(args.max_length or 0),
        "num_threads": str(args.threads),
        "max_queue_size": str(args.max_queue_size),
        "prompt_tokens": str(args.prompt_tokens),
    }
    write_repository(
        directory / "models", names, parameters, num_instances=args.num_instances, gpus=args.gpus
    )
    command = [str(installation.binary), f"--model-repository={directory / 'models'}"]
    if installation.backends is not None:
        write_backend(directory / "backends", installation.backends)
        command.append(f"--backend-directory={directory / 'backends'}")
    command += server_options(args, rest)
    with subprocess.Popen(command, env=environment(installation)) as server:

        def forward(number: int, frame: FrameType | None) -> None:
            server.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        if wait_ready(server, args, names):
            print(
                f"serving {', '.join(names)}: gRPC {args.host}:{args.grpc_port}, "
                f"http://{args.host}:{args.http_port}, metrics http://{args.host}:{args.metrics_port}/metrics",
                file=sys.stderr,
                flush=True,
            )
        return server.wait()


def server_options(args: argparse.Namespace, rest: list[str]) -> list[str]:
    """What tritonserver is told beside where the models are; the user's own options come last."""
    options = [
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        # A model that does not load must not take the others down; its own readiness says so.
        "--exit-on-error=false",
        f"--http-address={args.host}",
        f"--http-port={args.http_port}",
        f"--grpc-address={args.host}",
        f"--grpc-port={args.grpc_port}",
        f"--metrics-address={args.host}",
        f"--metrics-port={args.metrics_port}",
    ]
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        if not any(given.startswith(option) for given in rest):
            # A key that nobody has.
            options.append(f"{option}={RESTRICTED}:{secrets.token_hex()}={secrets.token_hex()}")
    return [*options, *rest]


def wait_ready(server: "subprocess.Popen[bytes]", args: argparse.Namespace, names: list[str]) -> bool:
    """True once every model answers; False when the server has ended, or a model does not load."""
    end = time.monotonic() + READY_TIMEOUT
    waiting = list(names)
    while time.monotonic() < end and server.poll() is None:
        waiting = [name for name in waiting if not _ready(args, f"models/{name}/ready")]
        if not waiting:
            return True
        if _ready(args, "health/live") and _failed(args, waiting[0]):
            break
        time.sleep(0.2)
    if server.poll() is None:
        print(f"serve: {', '.join(waiting)} did not load; the server's log says why", file=sys.stderr)
    return False


def _ready(args: argparse.Namespace, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{args.host}:{args.http_port}/v2/{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _failed(args: argparse.Namespace, name: str) -> bool:
    """Whether the repository's index calls a model unavailable, which it does once loading has failed."""
    request = urllib.request.Request(
        f"http://{args.host}:{args.http_port}/v2/repository/index", data=b"{}", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return False
    return f'"name":"{name}"' in text and '"state":"UNAVAILABLE"' in text


if __name__ == "__main__":
    raise SystemExit(main())

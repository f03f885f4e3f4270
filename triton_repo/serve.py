"""Serve an engine bundle through Triton.

    python -m triton_repo.serve --bundle engines/
    python -m triton_repo.serve --bundle engines/ --plain --max-num-seqs 8
    curl -d '{"text_input": "How many?", "max_tokens": 32}' localhost:8000/v2/models/ctc_llm/generate

Options that are not listed are passed to tritonserver, such as --grpc-use-ssl=true or --log-verbose=1.
The server listens on this machine only unless --host says otherwise. TLS and authentication are off.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, Parser, at_least, exit_status, port
from runtime.core.options import DEFAULT_MAX_QUEUE_SIZE, SHARED_PREFILL_CHUNK, current_method
from triton_repo.triton.limits import (
    DEFAULT_MAX_NUM_SEQS,
    check_options,
    choose_gpus,
    gpu_numbers,
    nodes_or_auto,
)
from triton_repo.triton.server import (
    check_known,
    check_ports,
    environment,
    find_server,
    server_options,
    write_backend,
    write_repository,
)
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL, TOKENS_MODEL

READY_SECONDS = 600.0
UNKNOWN_REASON = "the server's log says why"


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's arguments, and the rest, which are tritonserver's."""
    parser = Parser("serve", "triton_repo.serve", __doc__, allow_abbrev=False)
    add = parser.add_argument

    def add_count(name: str, default: int, text: str, least: int = 1) -> None:
        add(name, type=at_least(least), default=default, metavar="N", help=f"{text} (default %(default)s)")

    add("--bundle", type=Path, required=True, help="engine bundle directory")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--http-port", type=port, default=8000, help="default %(default)s")
    add("--grpc-port", type=port, default=8001, help="default %(default)s")
    add("--metrics-port", type=port, default=8002, help="default %(default)s")
    add(
        "--method",
        type=current_method,
        choices=METHODS,
        help="default: draft, if the bundle has a head",
    )
    text = "drafts per request and step (default %(default)s: what pays)"
    add("--num-nodes", type=nodes_or_auto, default=AUTO, metavar="N", help=text)
    add("--step", choices=STEPS, help="what runs a step: the host, or graphs on a device")
    text = "GPUs of compiled engines, such as 0,1, each with instances of its own (default: the first)"
    add("--gpus", type=gpu_numbers, metavar="LIST", help=text)
    text = f"default: what the engines were compiled for, or else {DEFAULT_MAX_NUM_SEQS}"
    add("--max-num-seqs", type=at_least(1), metavar="N", help=f"requests that decode at a time ({text})")
    text = "tokens of a prompt and its output (default: what the engines were compiled for, or the context)"
    add("--max-length", type=at_least(2), metavar="N", help=text)
    add_count("--max-queue-size", DEFAULT_MAX_QUEUE_SIZE, "requests in the queue; others are refused")
    add_count("--prefill-chunk-size", SHARED_PREFILL_CHUNK, "prompt tokens read at a time")
    add_count("--threads", 0, "threads per engine; 0: all cores", least=0)
    add_count(
        "--num-instances", 1, "processes per model, or per GPU, each with its own engines, caches and queue"
    )
    add("--plain", action="store_true", help=f"also serve {PLAIN_MODEL}: without the draft head")
    add("--tokens", action="store_true", help=f"also serve {TOKENS_MODEL}: token ids in, token ids out")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the server's exit status, 1 without a model, 2 for bad arguments."""
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    return exit_status("serve", lambda: _run(args, rest))


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    manifest = Bundle.load(args.bundle, verify=False).manifest  # the model verifies the files
    gpus = choose_gpus(manifest, args.gpus)
    check_options(manifest, args, rest)
    with tempfile.TemporaryDirectory(prefix="ctc-speculator-") as directory:
        return serve(args, rest, Path(directory), gpus)


def serve(
    args: argparse.Namespace, rest: list[str], directory: Path, gpus: Sequence[int] | None = None
) -> int:
    """Write the model repository and run the server until it ends; returns its exit status.

    If no model can be served, the server is ended and the status is 1.

    gpus: where the models run; None for the CPU
    SIGTERM and SIGINT reach the server as SIGTERM, so that running requests can end.
    """
    installation = find_server()
    check_known(rest, [f"--{name.replace('_', '-')}" for name in vars(args)], installation)
    check_ports(args, rest)
    names = [MODEL, *([PLAIN_MODEL] if args.plain else []), *([TOKENS_MODEL] if args.tokens else [])]
    parameters = {
        "bundle": str(args.bundle.resolve()),
        "method": args.method or "",
        "num_nodes": str(args.num_nodes),
        "step": args.step or "",
        "max_num_seqs": str(args.max_num_seqs or 0),
        "max_length": str(args.max_length or 0),
        "num_threads": str(args.threads),
        "max_queue_size": str(args.max_queue_size),
        "prefill_chunk_size": str(args.prefill_chunk_size),
    }
    write_repository(directory / "models", names, parameters, num_instances=args.num_instances, gpus=gpus)
    command = [str(installation.binary), f"--model-repository={directory / 'models'}"]
    if installation.backends is not None:
        write_backend(directory / "backends", installation.backends)
        command.append(f"--backend-directory={directory / 'backends'}")
    command += server_options(args, rest)
    with subprocess.Popen(command, env=environment(installation)) as server:
        stopped = []

        def forward(number: int, frame: FrameType | None) -> None:
            stopped.append(number)
            server.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        url = f"http://{args.host}:{args.http_port}"
        ready = wait_ready(server, url, names)
        if not (ready or stopped) and not serves_others(server, url, names):
            ended = server.poll()
            line = "no model can be served, so the server ends"
            if ended is not None:
                line = f"tritonserver ended with status {ended} before it was ready; its log above says why"
            print(f"serve: {line}", file=sys.stderr, flush=True)
            if ended is None:
                server.send_signal(signal.SIGTERM)
            server.wait()
            return 1
        if ready == set(names):
            print(
                f"serving {', '.join(names)}: gRPC {args.host}:{args.grpc_port}, "
                f"http://{args.host}:{args.http_port}, metrics http://{args.host}:{args.metrics_port}/metrics",
                file=sys.stderr,
                flush=True,
            )
        return server.wait()


def wait_ready(server: "subprocess.Popen[bytes]", url: str, names: list[str]) -> set[str]:
    """Wait until every model has loaded or has failed to; returns those that have loaded.

    Returns none if the server ends, and leaves out a model that takes longer than ``READY_SECONDS``.

    url: the server's HTTP address
    """
    end = time.monotonic() + READY_SECONDS
    loading, failed = set(names), dict[str, str]()
    while loading and time.monotonic() < end:
        if server.poll() is not None:
            return set()
        loading -= {name for name in loading if _fetch(f"{url}/v2/models/{name}/ready") is not None}
        found = failed_models(_fetch(f"{url}/v2/repository/index", b"{}") or b"[]")
        failed |= {name: reason for name, reason in found.items() if name in loading}
        loading -= failed.keys()
        if loading:
            time.sleep(0.2)
    for name in names:
        if name in failed:
            print(
                f"serve: {name} did not load: {failed[name] or UNKNOWN_REASON}", file=sys.stderr, flush=True
            )
        elif name in loading:
            print(f"serve: {name} did not load within {READY_SECONDS:g} seconds", file=sys.stderr, flush=True)
    return set(names) - failed.keys() - loading


def serves_others(server: "subprocess.Popen[bytes]", url: str, names: list[str]) -> bool:
    """Whether the server runs and has other models, of a repository of the user's, that did not fail."""
    if server.poll() is not None:
        return False
    models: list[dict[str, Any]] = json.loads(_fetch(f"{url}/v2/repository/index", b"{}") or b"[]")
    return any(each["name"] not in names and each.get("state") != "UNAVAILABLE" for each in models)


def failed_models(index: bytes) -> dict[str, str]:
    """The models that failed to load, each with the reason, from Triton's repository index.

    Their state is UNAVAILABLE. A model that is still loading has the state LOADING, or no state yet.
    """
    models: list[dict[str, Any]] = json.loads(index)
    failed = (model for model in models if model.get("state") == "UNAVAILABLE")
    return {model["name"]: one_line(model.get("reason", "")) for model in failed}


def one_line(reason: str) -> str:
    """A model's reason, without what Triton puts before and behind a Python exception's message."""
    return re.sub(r"^(Internal|Invalid argument): (\w+: )?", "", reason.strip().partition("\n")[0])


def _fetch(url: str, data: bytes | None = None) -> bytes | None:
    """A successful answer's body (a POST if ``data`` is given), or None."""
    try:
        with urllib.request.urlopen(url, data, timeout=5) as response:
            return bytes(response.read())
    except OSError:  # includes URLError and HTTPError
        return None


if __name__ == "__main__":
    raise SystemExit(main())

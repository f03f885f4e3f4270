"""Serve an engine bundle through Triton, or by a server of our own.

    python -m triton_repo.serve --bundle engines/
    python -m triton_repo.serve --bundle engines/ --plain --max-num-seqs 8
    curl -d '{"text_input": "How many?", "max_tokens": 32}' localhost:8000/v2/models/ctc_llm/generate

Triton, or a worker process of ours, decodes and answers gRPC. HTTP (generate, health, metrics), OpenAI's
interface on http://localhost:9000/v1 and a page on http://localhost:9000 are answered in front of it. If a
model process or the server dies or hangs, its streams end with the reason, and it is started anew; until then
nothing is ready.

Options that are not listed are passed to tritonserver, such as --log-verbose=1. The server listens on this
machine only unless --host says otherwise. The exit status is 0 after SIGTERM or Ctrl-C, for
which running requests get 30 seconds to end; 1 if no model can be served; 2 for options that cannot be used.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.core.bundle import DRAFT, METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, Parser, at_least, exit_status, port
from runtime.core.errors import RequestError
from runtime.core.options import (
    DEFAULT_MAX_QUEUE_SIZE,
    DEFAULT_MAX_QUEUE_TOKENS,
    DEFAULT_PREFIX_CACHE_MB,
    SHARED_PREFILL_CHUNK,
    choose_method,
    current_method,
)
from triton_repo.openai.server import add_options, read_access, read_tls, read_tool_form
from triton_repo.triton.config import (
    DEFAULT_MAX_NUM_SEQS,
    NO,
    YES,
    check_options,
    choose_gpus,
    gpu_numbers,
    nodes_or_auto,
)
from triton_repo.triton.directory import own_directory
from triton_repo.triton.guard import shared_memory_prefix
from triton_repo.triton.log import STOPPED_EARLY, TRITONSERVER, WORKER, say, write_to_stderr
from triton_repo.triton.process import free_ports
from triton_repo.triton.server import (
    LEAST,
    LOCAL_HOST,
    OWN,
    SERVERS,
    TRITON,
    Installation,
    check_known,
    check_own,
    check_ports,
    choose_server,
    environment,
    find_server,
    in_address,
    own_url,
    server_options,
    write_backend,
    write_repository,
)
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL, TOKENS_MODEL


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's arguments, and the rest, which are tritonserver's."""
    parser = Parser("serve", "triton_repo.serve", __doc__, allow_abbrev=False)
    add = parser.add_argument

    def add_count(name: str, default: int, text: str, least: int = 1) -> None:
        add(name, type=at_least(least), default=default, metavar="N", help=f"{text} (default %(default)s)")

    add("--bundle", type=Path, required=True, help="engine bundle directory")
    text = f"{TRITON}, {OWN}: a worker process of ours, or {AUTO}: Triton where one is found from {LEAST} on"
    text += f"; ctc serve has the default {AUTO}, python -m triton_repo.serve {TRITON}"
    add("--server", choices=SERVERS, default=TRITON, help=text)
    add("--host", default=LOCAL_HOST, help="address to listen on (default %(default)s)")
    text = "the same for gRPC, which has no key and no TLS (default: as --host, or 127.0.0.1 with either)"
    add("--grpc-host", metavar="HOST", help=text)
    add("--http-port", type=port, default=8000, help="default %(default)s")
    add("--grpc-port", type=port, default=8001, help="default %(default)s")
    add("--metrics-port", type=port, default=8002, help="default %(default)s")
    text = "of OpenAI's interface and the page; 0: neither is served (default %(default)s)"
    add("--openai-port", type=port_or_none, default=9000, metavar="N", help=text)
    add_options(parser)
    add(
        "--method",
        type=current_method,
        choices=METHODS,
        help="default: draft, if the bundle has a head",
    )
    text = "drafts per request and step (default %(default)s: what pays)"
    add("--num-nodes", type=nodes_or_auto, default=AUTO, metavar="N", help=text)
    text = "draft also what followed the last tokens earlier in the text (default: beside a draft head)"
    add("--prompt-lookup", action=argparse.BooleanOptionalAction, help=text)
    add("--step", choices=STEPS, help="what runs a step: the host, or graphs on a device")
    text = "GPUs of compiled engines, such as 0,1, each with instances of its own (default: the first)"
    add("--gpus", type=gpu_numbers, metavar="LIST", help=text)
    text = f"default: what the engines were compiled for, or else {DEFAULT_MAX_NUM_SEQS}"
    add("--max-num-seqs", type=at_least(1), metavar="N", help=f"requests that decode at a time ({text})")
    text = "tokens of a prompt and its output (default: what the engines were compiled for, or the context)"
    add("--max-length", type=at_least(2), metavar="N", help=text)
    add_count("--max-queue-size", DEFAULT_MAX_QUEUE_SIZE, "requests in the queue; others are refused")
    text = "tokens of prompts that wait to be read; others are refused, unless none wait"
    add_count("--max-queue-tokens", DEFAULT_MAX_QUEUE_TOKENS, text)
    add_count("--prefill-chunk-size", SHARED_PREFILL_CHUNK, "prompt tokens read at a time")
    text = "MiB of keys and values kept for later prompts with the same beginning; 0: none"
    add_count("--prefix-cache-mb", DEFAULT_PREFIX_CACHE_MB, text, least=0)
    add_count("--threads", 0, "threads per engine; 0: all cores", least=0)
    add_count(
        "--num-instances", 1, "processes per model, or per GPU, each with its own engines, caches and queue"
    )
    add("--plain", action="store_true", help=f"also serve {PLAIN_MODEL}: without the draft head")
    add("--tokens", action="store_true", help=f"also serve {TOKENS_MODEL}: token ids in, token ids out")
    return parser.parse_known_args(argv)


def port_or_none(text: str) -> int:
    """An argument type: the number of a port, or 0."""
    return 0 if text == "0" else port(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 after SIGTERM or SIGINT, 1 if no model can be served, 2 for bad arguments."""
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    return exit_status("serve", lambda: _run_until_stopped(args, rest))


def check_one_process(args: argparse.Namespace, gpus: Sequence[int] | None) -> None:
    """Raises RequestError for options that need several processes, which our own server does not have."""
    hint = f"our own server has one process; start several servers, or take --server {TRITON}"
    if args.num_instances > 1:
        raise RequestError(f"must be 1, got {args.num_instances}: {hint}", field="--num-instances")
    if gpus is not None and len(gpus) > 1:
        raise RequestError(f"must be one GPU, got {','.join(map(str, gpus))}: {hint}", field="--gpus")


def _run_until_stopped(args: argparse.Namespace, rest: list[str]) -> int:
    write_to_stderr(args.log_format)
    try:
        return _run(args, rest)
    except KeyboardInterrupt:  # SIGINT or SIGTERM, before the supervisor handles them
        say(STOPPED_EARLY)
        return 0


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    manifest = Bundle.load(args.bundle, verify=False).manifest  # the model verifies the files
    gpus = choose_gpus(manifest, args.gpus)
    drafts = choose_method(manifest, args.method, "the bundle", option="--method") == DRAFT
    check_options(manifest, args, rest)
    is_closed = read_access(args).api_key is not None or read_tls(args) is not None
    args.grpc_host = args.grpc_host or (LOCAL_HOST if is_closed else args.host)
    choice = choose_server(args.server, find_server)
    own = [f"--{name.replace('_', '-')}" for name in vars(args)]
    if choice.installation is None:
        check_own(rest, own, choice)
        check_one_process(args, gpus)
    else:
        check_known(rest, own, choice.installation)
    check_ports(args)
    if args.server == AUTO:
        say(choice.line)
    from triton_repo.web.request_log import tracing

    with own_directory() as directory, tracing(args.otlp_traces_endpoint):
        names = [MODEL, *([PLAIN_MODEL] if args.plain else []), *([TOKENS_MODEL] if args.tokens else [])]
        (metrics_port,) = free_ports(1)
        write_models(args, directory / "models", names, gpus)
        if choice.installation is None:
            command = worker_command(args, directory, metrics_port)
        else:
            command = triton_command(choice.installation, directory)
            command += server_options(args, rest, metrics_port)
        variables = environment(choice.installation)
        server = WORKER if choice.installation is None else TRITONSERVER
        return asyncio.run(_serve(args, directory, names, command, variables, metrics_port, drafts, server))


def write_models(
    args: argparse.Namespace, directory: Path, names: list[str], gpus: Sequence[int] | None
) -> None:
    """Write the model repository. gpus: where the models run; None for the CPU"""
    parameters = {
        "bundle": str(args.bundle.resolve()),
        "method": args.method or "",
        "num_nodes": str(args.num_nodes),
        "prompt_lookup": {True: YES, False: NO, None: ""}[args.prompt_lookup],
        "step": args.step or "",
        "max_num_seqs": str(args.max_num_seqs or 0),
        "max_length": str(args.max_length or 0),
        "num_threads": str(args.threads),
        "max_queue_size": str(args.max_queue_size),
        "max_queue_tokens": str(args.max_queue_tokens),
        "prefix_cache_mb": str(args.prefix_cache_mb),
        "prefill_chunk_size": str(args.prefill_chunk_size),
    }
    write_repository(directory, names, parameters, num_instances=args.num_instances, gpus=gpus)


def worker_command(args: argparse.Namespace, directory: Path, metrics_port: int) -> list[str]:
    """The command of our own worker. metrics_port: of its metrics, for this machine alone"""
    return [
        *(sys.executable, "-m", "triton_repo.worker", f"--model-repository={directory / 'models'}"),
        *(f"--grpc-address={args.grpc_host}", f"--grpc-port={args.grpc_port}"),
        f"--metrics-port={metrics_port}",
    ]


def triton_command(installation: Installation, directory: Path) -> list[str]:
    """Write the backend; returns tritonserver's command with where its files are."""
    command = [str(installation.binary), f"--model-repository={directory / 'models'}"]
    command.append(f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(directory)}")
    if installation.backends is not None:
        write_backend(directory / "backends", installation.backends)
        command.append(f"--backend-directory={directory / 'backends'}")
    return command


async def _serve(
    args: argparse.Namespace,
    directory: Path,
    names: list[str],
    command: list[str],
    variables: dict[str, str],
    metrics_port: int,
    drafts: bool,
    server: str,
) -> int:
    """Listen, and keep the server running until SIGTERM or SIGINT; returns the exit status.

    A second signal ends the running requests.

    drafts: whether the models decode with the draft head, which the page says
    server: what it is called in the log
    """
    from triton_repo.kserve import app as kserve
    from triton_repo.openai import app as openai
    from triton_repo.page.app import DRAFTED, PLAIN
    from triton_repo.triton.grpc_client import connect
    from triton_repo.triton.health import Health
    from triton_repo.triton.supervisor import Supervisor
    from triton_repo.web.backend import Launcher, metrics_app
    from triton_repo.web.server import listening

    url, access, tls = own_url(args.grpc_host, args.grpc_port), read_access(args), read_tls(args)
    async with connect(url, is_own=True) as client:
        headings = {MODEL: DRAFTED if drafts else PLAIN, PLAIN_MODEL: PLAIN}
        columns = {name: headings[name] for name in names if name in headings}
        launcher = Launcher(client, Health(), f"http://{LOCAL_HOST}:{metrics_port}/metrics", columns, names)
        tool_form = read_tool_form(args.tool_parser, args.bundle)
        service = openai.Service(url, MODEL, args.model_name or MODEL, access, tool_form)
        apps = {
            "--http-port": (args.http_port, kserve.make_app(launcher, access)),
            "--metrics-port": (args.metrics_port, metrics_app(launcher)),
        }
        if args.openai_port:
            apps["--openai-port"] = (args.openai_port, openai.make_app(service, launcher))
        ready = ready_line(args, names)
        supervisor = Supervisor(command, variables, directory, names, client, launcher.health, ready, server)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
        async with listening(args.host, apps, tls):
            return await supervisor.run()


def ready_line(args: argparse.Namespace, names: list[str]) -> str:
    """What is served where."""
    http = f"{'https' if args.ssl_certfile else 'http'}://{in_address(args.host)}"
    addresses = [
        f"gRPC {in_address(args.grpc_host)}:{args.grpc_port}",
        f"{http}:{args.http_port}",
        f"metrics {http}:{args.metrics_port}/metrics",
        *([f"OpenAI and page {http}:{args.openai_port}"] if args.openai_port else []),
    ]
    return f"serving {', '.join(names)}: {', '.join(addresses)}"


if __name__ == "__main__":
    raise SystemExit(main())

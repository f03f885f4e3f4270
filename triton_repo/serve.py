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
from pathlib import Path

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, MAX_PORT, Parser, at_least, exit_status, not_empty, port
from runtime.core.options import (
    DEFAULT_MAX_QUEUE_SIZE,
    DEFAULT_MAX_QUEUE_TOKENS,
    DEFAULT_PREFIX_CACHE_MB,
    SHARED_PREFILL_CHUNK,
    current_method,
)
from triton_repo.openai.server import add_options, read_access, read_tls, read_tool_form
from triton_repo.triton.config import (
    DEFAULT_MAX_NUM_SEQS,
    NO,
    PARAMETERS,
    YES,
    check_options,
    choose_gpus,
    gpu_numbers,
    nodes_or_auto,
)
from triton_repo.triton.guard import own_directory
from triton_repo.triton.log import STOPPED_EARLY, TRITONSERVER, WORKER, say, write_to_stderr
from triton_repo.triton.process import free_ports
from triton_repo.triton.server import (
    LEAST,
    LOCAL_HOST,
    OWN,
    SERVERS,
    TRITON,
    Installation,
    check_ports,
    check_rest,
    choose_server,
    environment,
    find_server,
    in_address,
    own_url,
    server_command,
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
    add("--host", type=not_empty, default=LOCAL_HOST, help="address to listen on (default %(default)s)")
    text = "the same for gRPC, which has no key and no TLS (default: as --host, or 127.0.0.1 with either)"
    add("--grpc-host", type=not_empty, metavar="HOST", help=text)
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
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a whole number between 0 and {MAX_PORT}, got {text!r}")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 after SIGTERM or SIGINT, 1 if no model can be served, 2 for bad arguments."""
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    return exit_status("serve", lambda: _run_until_stopped(args, rest))


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
    drafts = check_options(manifest, args, rest)
    is_closed = read_access(args).api_key is not None or read_tls(args) is not None
    args.grpc_host = args.grpc_host or (LOCAL_HOST if is_closed else args.host)
    choice = choose_server(args.server, find_server)
    check_rest(args, rest, gpus, choice)
    check_ports(args)
    if args.server == AUTO:
        say(choice.line)
    from triton_repo.web.request_log import tracing

    with own_directory() as directory, tracing(args.otlp_traces_endpoint):
        names = [MODEL, *([PLAIN_MODEL] if args.plain else []), *([TOKENS_MODEL] if args.tokens else [])]
        parameters = model_parameters(args)
        write_repository(directory / "models", names, parameters, num_instances=args.num_instances, gpus=gpus)
        return asyncio.run(_serve(args, rest, choice.installation, directory, names, drafts))


def model_parameters(args: argparse.Namespace) -> dict[str, str]:
    """Those of ``config.pbtxt`` that the options say."""
    lookup = {True: YES, False: NO, None: None}[args.prompt_lookup]
    given = {
        **vars(args),
        "bundle": args.bundle.resolve(),
        "num_threads": args.threads,
        "prompt_lookup": lookup,
    }
    return {name: str(given[name]) for name in PARAMETERS if given[name] is not None}


async def _serve(
    args: argparse.Namespace,
    rest: list[str],
    installation: Installation | None,
    directory: Path,
    names: list[str],
    drafts: bool,
) -> int:
    """Listen, and keep the server running until SIGTERM or SIGINT; returns the exit status.

    A second signal ends the running requests.

    rest: tritonserver's options
    installation: Triton's; None for our own worker
    drafts: whether the models decode with the draft head, which the page says
    """
    from triton_repo import kserve
    from triton_repo.openai import app as openai
    from triton_repo.page.app import DRAFTED, PLAIN
    from triton_repo.triton.grpc_client import connect
    from triton_repo.triton.health import Health
    from triton_repo.triton.supervisor import Supervisor
    from triton_repo.web.backend import Launcher, metrics_app
    from triton_repo.web.server import listening

    (metrics_port,) = free_ports(1)
    command = server_command(installation, args, rest, directory, metrics_port)
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
        variables, server = environment(installation), TRITONSERVER if installation else WORKER
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

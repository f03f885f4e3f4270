"""Serve OpenAI's interface in front of a running server, so that OpenAI's clients work with a bundle.

    python -m triton_repo.openai.server --url host:8001                # then http://localhost:9000/v1
    python -m triton_repo.openai.server --model ctc_llm_plain --port 9001
    curl localhost:9000/v1/completions --json '{"model": "ctc_llm", "prompt": "How many", "max_tokens": 32}'

The server has to run already; its launcher serves ctc_llm on port 9000 itself.
"""

import argparse
import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.bundle import CHAT_TEMPLATE_NAME
from runtime.core.cli import Parser, exit_status, grpc_address, not_empty, port
from runtime.core.errors import UserError
from triton_repo.openai.tool_calls import FORMS, ToolForm, form_of_template
from triton_repo.triton.log import JSON_FORM, TEXT_FORM, write_to_stderr
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL

if TYPE_CHECKING:
    from triton_repo.web.access import Access

# Keys on a command line are seen by every user of a machine.
KEY_VARIABLE = "CTC_API_KEY"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("openai", "triton_repo.openai.server", __doc__)
    text = "Triton's gRPC address (default %(default)s)"
    parser.add_argument("--url", type=grpc_address, default="localhost:8001", help=text)
    text = "address to listen on (default %(default)s)"
    parser.add_argument("--host", type=not_empty, default="127.0.0.1", help=text)
    parser.add_argument("--port", type=port, default=9000, help="of this server (default %(default)s)")
    parser.add_argument("--model", choices=(MODEL, PLAIN_MODEL), default=MODEL, help="Triton's model")
    add_options(parser)
    args = parser.parse_args(argv)
    return exit_status("openai", lambda: _run(args))


def add_options(parser: Parser) -> None:
    """The options of whoever serves this interface."""
    text = "what clients call it (default: as Triton does)"
    parser.add_argument("--model-name", type=not_empty, metavar="NAME", help=text)
    text = "how the model writes calls of tools (default: as its chat template shows)"
    parser.add_argument("--tool-parser", choices=tuple(FORMS), help=text)
    text = f"clients have to send this key (default: the environment variable {KEY_VARIABLE}, or none)"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    text = (
        "PEM file of a certificate, and of those that sign it: HTTP is answered with TLS (default: without)"
    )
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help=text)
    text = "PEM file of its private key (default: it is in the certificate's file)"
    parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help=text)
    text = "form of the log's lines about requests and about the server (default %(default)s)"
    parser.add_argument("--log-format", choices=(TEXT_FORM, JSON_FORM), default=TEXT_FORM, help=text)
    text = "address of OTLP over HTTP, such as http://localhost:4318/v1/traces, for a span of every request"
    parser.add_argument("--otlp-traces-endpoint", metavar="URL", help=text)
    text = "page that may ask from a browser, such as https://chat.example, or * for all; may be repeated"
    parser.add_argument(
        "--allow-origin", type=page_origin, metavar="ORIGIN", action="append", default=[], help=text
    )


def page_origin(text: str) -> str:
    """An origin as browsers name it, or "*" for all. Raises ArgumentTypeError."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"must be such as https://chat.example, or *, got {text!r}")
    return text


def read_access(args: argparse.Namespace) -> "Access":
    """Who may ask, by the options. Raises UserError for an empty key."""
    from triton_repo.web.access import Access

    given = args.api_key is not None
    key = args.api_key if given else os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise UserError(f"must not be empty, got {key!r}", field="--api-key" if given else KEY_VARIABLE)
    return Access(key, frozenset(args.allow_origin))


def read_tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """The certificate with which HTTP is answered; None without TLS. Raises UserError for unusable files."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise UserError("needs --ssl-certfile", field="--ssl-keyfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A key with a password would be asked for on the terminal.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        files = " and ".join(str(path) for path in (args.ssl_certfile, args.ssl_keyfile) if path)
        problem = f"{files} must be PEM files of a certificate and its key without a password: {error}"
        raise UserError(problem, field="--ssl-certfile") from error
    return context


def read_tool_form(name: str | None, bundle: Path | None) -> ToolForm | None:
    """The form of calls that an option names, or else that of a bundle's chat template; None for neither."""
    if name is not None:
        return FORMS[name]
    try:
        if bundle is not None:
            return form_of_template((bundle / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):  # a model without a template, or on another machine
        pass
    return None


def _run(args: argparse.Namespace) -> int:
    from triton_repo.openai.app import Service, make_app
    from triton_repo.triton.grpc_client import model_config
    from triton_repo.triton.server import in_address
    from triton_repo.web.request_log import tracing
    from triton_repo.web.server import listen

    write_to_stderr(args.log_format)
    config = model_config(args.url, args.model)  # raises UserError if Triton does not serve the model
    bundle = config.parameters["bundle"].string_value
    name = args.model_name or args.model
    tls = read_tls(args)
    scheme = "http" if tls is None else "https"
    ready = f"serving {name} on {scheme}://{in_address(args.host)}:{args.port}/v1"
    tool_form = read_tool_form(args.tool_parser, Path(bundle) if bundle else None)
    service = Service(args.url, args.model, name, read_access(args), tool_form)
    with tracing(args.otlp_traces_endpoint):
        listen(make_app(service), args.host, args.port, ready, tls)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

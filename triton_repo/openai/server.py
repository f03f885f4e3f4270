"""Serve OpenAI's interface in front of a running server, so that OpenAI's clients work with a bundle.

    python -m triton_repo.openai.server                                # then http://localhost:9000/v1
    python -m triton_repo.openai.server --url host:8001 --bundle engines/ --port 9000 --model-name my-model
    curl localhost:9000/v1/completions -d '{"model": "ctc_llm", "prompt": "How many", "max_tokens": 32}'

The Triton server has to run already. Conversations of several messages need the bundle's chat template: it is
read from --bundle or, without it, where the Triton server has the bundle, if that is this machine. There is
neither TLS nor authentication.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.cli import Parser, exit_status, port
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL

if TYPE_CHECKING:
    from runtime.chat_template import ChatTemplate


def main(argv: list[str] | None = None) -> int:
    parser = Parser("openai", "triton_repo.openai.server", __doc__)
    parser.add_argument("--url", default="localhost:8001", help="Triton's gRPC address (default %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=port, default=9000, help="of this server (default %(default)s)")
    parser.add_argument("--model", choices=(MODEL, PLAIN_MODEL), default=MODEL, help="Triton's model")
    parser.add_argument("--model-name", metavar="NAME", help="what clients call it (default: as Triton does)")
    text = "engine bundle with the chat template (default: where the server says that it has it)"
    parser.add_argument("--bundle", type=Path, help=text)
    args = parser.parse_args(argv)
    return exit_status("openai", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    template = read_template(args)
    from triton_repo.openai.app import Service, make_app
    from triton_repo.web_server import listen

    name = args.model_name or args.model
    ready = f"serving {name} on http://{args.host}:{args.port}/v1"
    if template is None:
        ready += " without a chat template: for prompts, and for chats of one user message"
    listen(make_app(Service(args.url, args.model, name, template)), args.host, args.port, ready)
    return 0


def read_template(args: argparse.Namespace) -> "ChatTemplate | None":
    """The chat template of ``--bundle`` or, without it, of the bundle that Triton's model was loaded from.

    None if that has no template, or is not on this machine. Raises UserError if Triton does not serve the
    model, and BundleError for a bad ``--bundle``.
    """
    from runtime.chat_template import ChatTemplate

    if args.bundle is not None:
        template = ChatTemplate.load(args.bundle)
        served_bundle(args.url, args.model)
        return template
    bundle = served_bundle(args.url, args.model)
    return ChatTemplate.load(bundle) if bundle is not None and bundle.is_dir() else None


def served_bundle(url: str, model: str) -> Path | None:
    """Where Triton's model was loaded from, by its configuration; None if that does not say.

    Raises UserError if the server cannot be reached or has no such model.
    """
    from triton_repo.triton.grpc_client import model_config

    path = model_config(url, model).parameters["bundle"].string_value
    return Path(path) if path else None


if __name__ == "__main__":
    raise SystemExit(main())

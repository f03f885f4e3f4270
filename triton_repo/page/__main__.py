"""Serve a local page that streams two completions side by side: with the draft head, and without.

    python -m triton_repo.page                    # then open http://localhost:8080
    python -m triton_repo.page --port 9000 --url host:8001

The server has to serve the model without the draft head too (its option --plain).
"""

import argparse

from runtime.core.cli import Parser, exit_status, grpc_address, not_empty, port
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL


def main(argv: list[str] | None = None) -> int:
    parser = Parser("page", "triton_repo.page", __doc__)
    text = "Triton's gRPC address (default %(default)s)"
    parser.add_argument("--url", type=grpc_address, default="localhost:8001", help=text)
    text = "address to listen on (default %(default)s)"
    parser.add_argument("--host", type=not_empty, default="127.0.0.1", help=text)
    parser.add_argument("--port", type=port, default=8080, help="of the page (default %(default)s)")
    args = parser.parse_args(argv)
    return exit_status("page", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from triton_repo.page.app import make_app
    from triton_repo.triton.grpc_client import model_config
    from triton_repo.triton.server import in_address
    from triton_repo.web.server import listen

    for model in (MODEL, PLAIN_MODEL):
        model_config(args.url, model)
    ready = f"open http://{in_address(args.host)}:{args.port}"
    listen(make_app(args.url), args.host, args.port, ready)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

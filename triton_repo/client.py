"""Stream a completion from a running server over gRPC.

    python -m triton_repo.client "How many days are there in four weeks?" --max-tokens 128
    python -m triton_repo.client "Tell me a story." --temperature 0.8 --seed 1 --url host:8001

The text goes to stdout as it comes, its speed to stderr.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.core.cli import Parser, exit_status, grpc_address
from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import Prompt, stdin_text

# What a request's field for a number of tokens holds.
MAX_TOKENS = 2**31 - 1
# The flags of the fields that errors name.
FLAGS = {
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "seed": "--seed",
    "stop_words": "--stop",
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("client", "triton_repo.client", __doc__)
    parser.add_argument("prompt", metavar="PROMPT", help="a user's message; - reads it from stdin")
    parser.add_argument("--system", help="system message")
    text = "gRPC address (default %(default)s)"
    parser.add_argument("--url", type=grpc_address, default="localhost:8001", help=text)
    parser.add_argument(
        "--max-tokens", type=token_count, default=256, metavar="N", help="default %(default)s"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default 1: all tokens")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument(
        "--stop", action="append", default=[], help="stop string; may be given more than once"
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompt without the chat template")
    args = parser.parse_args(argv)
    if "" in args.stop:
        parser.error("--stop: must not be empty")
    if args.raw and args.system is not None:
        parser.error("--system: is for chats, so it does not go with --raw")
    return exit_status("client", lambda: _run(args.url, _options(args)))


def token_count(text: str) -> int:
    """An argument type: a number of tokens."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"must be a whole number between 1 and {MAX_TOKENS}, got {text!r}")
    return value


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The inputs of the request. Raises RequestError for text on stdin that cannot be read."""
    from triton_repo.triton.grpc_client import prompt_options

    prompt = Prompt(stdin_text() if args.prompt == "-" else args.prompt, args.raw).with_system(args.system)
    options: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "stream": True,
    }
    options |= prompt_options(prompt)
    options |= {"seed": args.seed} if args.seed is not None else {}
    options |= {"stop_words": args.stop} if args.stop else {}
    return options


def _run(url: str, options: Mapping[str, Any]) -> int:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    from triton_repo.triton.grpc_client import channel_args, model_config, stream
    from triton_repo.triton.tensors import MODEL

    model_config(url, MODEL)
    try:
        with grpc.InferenceServerClient(url, channel_args=channel_args(url)) as client:
            _print(stream(client, options))
    except (InferenceServerException, RequestError) as error:
        text = error.message() if isinstance(error, InferenceServerException) else str(error)
        found = UserError.of_text(text, FLAGS)
        raise UserError(found.problem, field=found.field and FLAGS[found.field]) from error
    return 0


def _print(responses: Iterator[dict[str, Any]]) -> None:
    """Print the text as it comes, then its speed on stderr."""
    began = first = time.perf_counter()
    last: dict[str, Any] = {}
    for last in responses:
        if first == began:
            first = time.perf_counter()
        print(last["text_output"][0].decode(), end="", flush=True)
    print()
    tokens = int(last["num_output_tokens"][0])
    rest = max(tokens - 1, 1)
    print(
        f"{tokens} tokens, first after {1000 * (first - began):.0f} ms, "
        f"{1000 * (time.perf_counter() - first) / rest:.2f} ms/token, "
        f"{last['acceptance_length'][0]:.2f} tokens a step",
        file=sys.stderr,
    )


if __name__ == "__main__":
    raise SystemExit(main())

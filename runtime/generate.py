"""Stream a completion, or complete a file of prompts.

    python -m runtime.generate --bundle engines/ --prompt "How many ...?" --show-drafts
    python -m runtime.generate --bundle engines/ --prompts prompts.jsonl --json > completions.jsonl

With ``--json`` there is one object a prompt and line: index (from 0), prompt, text, token_ids, num_steps,
beta (tokens per step, without the first token, which comes from the prompt), ms_per_token
(of the steps), finish_reason (stop or length) and, with ``--log-probs``, the tokens' log_probs. Without it,
completions of several prompts begin with a line ``=== 1 of 3: ...`` each.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, Parser, at_least, coloured, exit_status, num_nodes
from runtime.core.errors import RequestError
from runtime.core.options import EBNF, JSON_SCHEMA, REGEX, SHAPES, TREE, current_method
from runtime.core.prompts import Prompt, read_prompts, read_text, stdin_text
from runtime.decode.sampling_params import SamplingParams, add_sampling_options, sampling_settings

if TYPE_CHECKING:
    from runtime.decode.grammar import Grammar
    from runtime.decode.sequence import Chunk, Piece
    from runtime.decoder import SpeculativeDecoder

DRAFTED, RESET = "\033[32m", "\033[0m"
# Of a prompt, this many characters are in the line before its completion.
TITLE_LENGTH = 60


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("generate", lambda: generate(args))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("generate", "runtime.generate", __doc__)
    text = parser.add_argument_group("text")
    text.add_argument("--bundle", type=Path, required=True, help="engine bundle directory")
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="a user's message; - reads it from stdin")
    source.add_argument(
        "--prompts", type=Path, help="jsonl file of turns, question, prompt, messages, conversations or text"
    )
    add = text.add_argument
    text.add_argument("--system", help="system message, for prompts without one of their own")
    add("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    add("--max-new-tokens", type=int, default=256, help="tokens of a completion at most")
    add("--stop", action="append", default=[], help="stop string; may be given more than once")
    guide = text.add_mutually_exclusive_group()
    guide.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the text has to be JSON of this schema"
    )
    text_of = "the text has to follow this grammar, in the notation of Lark or GBNF"
    guide.add_argument("--grammar", type=Path, metavar="FILE", help=text_of)
    guide.add_argument("--regex", help="the text has to match this regular expression as a whole")
    add_sampling_options(parser)
    add = parser.add_argument_group("drafting", "None of these changes the text.").add_argument
    add("--method", type=current_method, choices=METHODS, help="default: draft, if the bundle has a head")
    text_of = "draft nodes verified a step (default %(default)s: what pays; 8 without a head)"
    add("--num-nodes", type=num_nodes, default=AUTO, metavar="N", help=text_of)
    text_of = "chain: verify the best path alone (default: tree)"
    add("--tree", choices=SHAPES, default=TREE, help=text_of)
    text_of = "of speculative streams: drafts that go on to the upper layers (default: as exported; 256: all)"
    add("--kept-nodes", type=at_least(1), help=text_of)
    text_of = "draft also what followed the last tokens earlier in the text (default: beside a draft head)"
    add("--prompt-lookup", action=argparse.BooleanOptionalAction, help=text_of)
    add(
        "--step", choices=STEPS, help="what runs a step: the host, or graphs on a device (default: by bundle)"
    )
    add("--device", help="of graph steps: cpu, or a GPU as cuda:0")
    add("--threads", type=int, help="default: all cores")
    group = parser.add_argument_group("output")
    form = group.add_mutually_exclusive_group()
    text_of = "colour the tokens that the draft head proposed, on a terminal and without NO_COLOR"
    form.add_argument("--show-drafts", action="store_true", help=text_of)
    form.add_argument("--json", action="store_true", help="one JSON object a prompt and line")
    group.add_argument(
        "--log-probs", action="store_true", help="the model's own, of every token, with --json"
    )
    args = parser.parse_args(argv)
    if args.raw and args.system is not None:
        parser.error("--system: is for chats, so it does not go with --raw")
    if args.log_probs and not args.json:
        parser.error("--log-probs: is written with --json only")
    return args


def read_grammar(args: argparse.Namespace) -> "Grammar | None":
    """What the options say that the text has to be. Raises RequestError."""
    schema, grammar = "--json-schema", "--grammar"
    given = {
        (schema, JSON_SCHEMA): args.json_schema and read_text(schema, args.json_schema),
        (grammar, EBNF): args.grammar and read_text(grammar, args.grammar),
        ("--regex", REGEX): args.regex,
    }
    for (flag, kind), text in given.items():
        if text is not None:
            from runtime.decode.grammar import Grammar  # imports numpy and tokenizers

            try:
                return Grammar(kind, text)
            except RequestError as error:
                raise RequestError(error.problem, field=flag) from error
    return None


def given_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line. Raises RequestError."""
    if args.prompts:
        prompts = read_prompts(args.prompts)
    else:
        prompts = [Prompt(stdin_text() if args.prompt == "-" else args.prompt)]
    if args.raw:
        for number, prompt in enumerate(prompts, 1):
            if prompt.before:
                raise RequestError(
                    f"--raw: expected prompts of one text, got {len(prompt.before) + 1} messages in "
                    f"prompt {number} of {args.prompts}, which only the chat template joins"
                )
        prompts = [Prompt(prompt.text, raw=True) for prompt in prompts]
    return [prompt.with_system(args.system) for prompt in prompts]


def generate(args: argparse.Namespace) -> int:
    """Decode the prompts and print their completions; returns the exit status.

    Raises RequestError before the first is decoded if any of them cannot be.
    """
    sampling = SamplingParams(**sampling_settings(args), log_probs=args.log_probs)
    prompts = given_prompts(args)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "stop_strings": args.stop,
        "sampling": sampling,
        "grammar": read_grammar(args),
    }
    bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
    from tqdm import tqdm

    from runtime.decoder import SpeculativeDecoder, encode_prompts  # imports numba and ONNX Runtime
    from runtime.device.plan import explain_size

    decoder = SpeculativeDecoder.from_bundle(
        args.bundle,
        method=args.method,
        num_nodes=args.num_nodes,
        tree=args.tree,
        num_threads=args.threads,
        step=args.step,
        device=args.device,
        kept_nodes=args.kept_nodes,
        prompt_lookup=args.prompt_lookup,
    )
    if args.num_nodes is not None:
        _, line = explain_size(bundle, decoder.batch.runner, args.method, args.num_nodes)
        if line:
            print(f"generate: {line}", file=sys.stderr)
    if args.prompts:
        encoded = encode_prompts(decoder, prompts, where=f"{args.prompts}:", **options)
    else:
        encoded = [decoder.prompt_tokenizer.encode_prompt(prompt) for prompt in prompts]
    if args.json:
        bar = tqdm(prompts, unit="prompt", disable=len(prompts) == 1 or not sys.stderr.isatty())
        for index, prompt in enumerate(bar):
            row = {"index": index, "prompt": prompt.text, **complete(decoder, encoded[index], options)}
            print(json.dumps(row, ensure_ascii=False), flush=True)
        return 0
    for number, prompt in enumerate(prompts, 1):
        if len(prompts) > 1:
            print(f"{chr(10) * (number > 1)}=== {number} of {len(prompts)}: {_title(prompt.text)}")
        chunks = decoder.stream(encoded[number - 1], **options)
        printed = print_stream(chunks, show_drafts=coloured(args.show_drafts))
        print(printed.summary(), file=sys.stderr)
    return 0


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TITLE_LENGTH else f"{line[:TITLE_LENGTH]}..."


def complete(
    decoder: "SpeculativeDecoder", prompt_ids: Sequence[int], options: dict[str, Any]
) -> dict[str, Any]:
    chunks = []
    times = []
    for chunk in decoder.stream(prompt_ids, **options):
        chunks.append(chunk)
        times.append(time.perf_counter())
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    steps, decoded = len(chunks) - 1, len(pieces) - 1
    log_probs = {"log_probs": [piece.log_prob for piece in pieces]} if options["sampling"].log_probs else {}
    return {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [piece.token_id for piece in pieces],
        **log_probs,
        "num_steps": steps,
        "beta": round(decoded / steps, 4) if steps else None,
        "ms_per_token": round(1000 * (times[-1] - times[0]) / decoded, 4) if decoded else None,
        "finish_reason": chunks[-1].finish_reason,
    }


@dataclass(frozen=True)
class Printed:
    """A text that was streamed to stdout.

    steps: steps after the first token, which comes with the prompt
    drafted: how many of its tokens the draft head proposed
    prefill_seconds, decode_seconds: until the first token, and from there to the end
    finish_reason: of the last chunk; None for a text that was stopped, which may have no token yet
    """

    text: str
    tokens: int
    steps: int
    drafted: int
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str | None

    def summary(self) -> str:
        """Tokens, time, speed, and tokens a step in one line."""
        line = f"{self.tokens} tokens, prompt read in {1000 * self.prefill_seconds:.0f} ms"
        if self.steps and self.decode_seconds:
            decoded = self.tokens - 1
            line += (
                f", {1000 * self.decode_seconds / decoded:.2f} ms/token ({decoded / self.decode_seconds:.0f} "
                f"tokens/s), {decoded / self.steps:.2f} tokens a step, {self.drafted} drafted"
            )
        return line


def print_stream(chunks: "Iterable[Chunk]", *, show_drafts: bool) -> Printed:
    """Print text as it is accepted.

    show_drafts: whether to colour the tokens that the draft head proposed
    """
    began = first = time.perf_counter()
    pieces: list[Piece] = []
    steps, reason = -1, None
    try:
        for chunk in chunks:
            if steps < 0:
                first = time.perf_counter()
            steps += 1
            pieces += chunk.pieces
            for piece in chunk.pieces:
                is_coloured = show_drafts and piece.drafted and piece.text
                print(f"{DRAFTED}{piece.text}{RESET}" if is_coloured else piece.text, end="")
            sys.stdout.flush()
            reason = chunk.finish_reason
        ended = time.perf_counter()
    finally:
        if pieces:  # also where an error follows the beginning of a text
            print()
    return Printed(
        text="".join(piece.text for piece in pieces),
        tokens=len(pieces),
        steps=steps,
        drafted=sum(piece.drafted for piece in pieces),
        prefill_seconds=first - began,
        decode_seconds=ended - first,
        finish_reason=reason,
    )


if __name__ == "__main__":
    raise SystemExit(main())

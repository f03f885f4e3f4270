"""Stream a completion, or complete a file of prompts.

    python -m runtime.generate --bundle engines/ --prompt "How many ...?" --show-drafts
    python -m runtime.generate --bundle engines/ --prompts prompts.jsonl --json > completions.jsonl

With ``--json`` there is one object a prompt and line: index (from 0), prompt, text, token_ids, num_steps,
beta (tokens per step, without the first token, which comes from the prompt), ms_per_token
(of the steps), finish_reason (stop or length) and, with ``--log-probs``, the tokens' log_probs. Without it,
completions of several prompts begin with a line ``=== 1 of 3: ...`` each.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, Parser, at_least, exit_status, num_nodes
from runtime.core.errors import RequestError
from runtime.core.options import EBNF, JSON_SCHEMA, REGEX, SHAPES, TREE, current_method
from runtime.core.prompts import Prompt, read_prompts, read_text, stdin_text
from runtime.decode.sampling_params import SamplingParams, add_sampling_options, sampling_settings

if TYPE_CHECKING:
    from runtime.decode.grammar import Grammar


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def command() -> int:
        sampling = SamplingParams(**sampling_settings(args), log_probs=args.log_probs)
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
        prompts = [prompt.with_system(args.system) for prompt in prompts]
        grammar = read_grammar(args)
        bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
        from runtime.terminal.completions import generate  # imports numba and ONNX Runtime

        return generate(args, bundle, prompts, sampling, grammar)

    return exit_status("generate", command)


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
    add(
        "--method",
        type=current_method,
        choices=METHODS,
        help="default: draft, if the bundle has a head",
    )
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


if __name__ == "__main__":
    raise SystemExit(main())

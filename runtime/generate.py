"""Stream a completion, or complete a file of prompts.

    python -m runtime.generate --bundle engines/ --prompt "How many ...?" --show-drafts
    python -m runtime.generate --bundle engines/ --prompts prompts.jsonl --json > completions.jsonl
    python -m runtime.generate --bundle engines/ --prompt "A story:" --temperature 0.8 --top-p 0.95 --seed 1

With ``--json`` there is one object a prompt and line: text, token_ids, num_steps, beta (the
acceptance length: tokens per step, without the first token, which comes from the prompt), ms_per_token (of
the steps) and, with ``--log-probs``, the tokens' log_probs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runtime.budget.graph_sizes import explain_size
from runtime.bundle import METHODS, STEPS, Bundle
from runtime.cli import AUTO, at_least, exit_status, num_nodes
from runtime.decoder import DEFAULT_NUM_NODES, SpeculativeDecoder
from runtime.decoding.sampling import GREEDY, SamplingParams
from runtime.decoding.sequence import Chunk
from runtime.text.prompts import Prompt, read_prompts
from runtime.trees.chains import SHAPES, TREE

DRAFTED, RESET = "\033[32m", "\033[0m"
# Fields of ``SamplingParams`` that have a flag.
SAMPLING_OPTIONS = (
    ("temperature", float, "default 0: greedy"),
    ("top_k", int, "only the k best tokens; default 0: all"),
    ("top_p", float, "only the best tokens that have this probability together; default 1: all"),
    ("min_p", float, "only tokens this likely, relative to the best; default 0: all"),
    ("repetition_penalty", float, "above 1: less of what is in the prompt or the output; default 1: off"),
    ("presence_penalty", float, "taken off tokens that are in the output; default 0: off"),
    ("frequency_penalty", float, "the same, as often as they are in it; default 0: off"),
    ("seed", int, "the same seed gives the same text; default: another one every time"),
)


def complete(decoder: SpeculativeDecoder, prompt: Prompt, options: dict[str, Any]) -> dict[str, Any]:
    """One prompt's completion with its statistics."""
    chunks = []
    times = []
    for chunk in decoder.stream(decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw), **options):
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


def print_stream(chunks: Iterable[Chunk], *, show_drafts: bool) -> dict[str, float]:
    """Print text as it is accepted; returns counts and seconds."""
    began = first = time.perf_counter()
    steps, tokens, drafted = -1, 0, 0
    for chunk in chunks:
        if steps < 0:
            first = time.perf_counter()
        steps += 1
        tokens += len(chunk.pieces)
        drafted += sum(piece.drafted for piece in chunk.pieces)
        for piece in chunk.pieces:
            coloured = show_drafts and piece.drafted and piece.text
            print(f"{DRAFTED}{piece.text}{RESET}" if coloured else piece.text, end="")
        sys.stdout.flush()
    print()
    now = time.perf_counter()
    return {
        "prefill": first - began,
        "decode": now - first,
        "steps": steps,
        "tokens": tokens,
        "drafted": drafted,
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return exit_status("generate", lambda: generate(args))
    except BrokenPipeError:
        # The reader of the pipe has gone. Python would fail once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="a user's message")
    source.add_argument("--prompts", type=Path, help="jsonl file of turns, question, prompt or text")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--max-new-tokens", type=int, default=256, help="default 256")
    add("--stop", action="append", default=[], help="stop string; may be given more than once")
    for name, kind, text in SAMPLING_OPTIONS:
        add(f"--{name.replace('_', '-')}", type=kind, default=getattr(GREEDY, name), help=text)
    add("--log-probs", action="store_true", help="the model's own, of every token (with --json)")
    add("--method", choices=METHODS, help="default: draft where the bundle has a draft head")
    add(
        "--num-nodes",
        type=num_nodes,
        default=DEFAULT_NUM_NODES,
        help=f"draft nodes verified a step (default %(default)s), or {AUTO}",
    )
    add("--tree", choices=SHAPES, default=TREE, help="chain: verify the best path alone (default: tree)")
    add(
        "--kept-nodes",
        type=at_least(1),
        help="of speculative streams: drafts that go on to the upper layers (default: as exported; 256: all)",
    )
    add("--step", choices=STEPS, help="what runs a step: the host, or graphs on a device")
    add("--device", help="of graph steps: cpu, or a GPU as cuda:0")
    add("--threads", type=int, help="default: all cores")
    add("--show-drafts", action="store_true", help="colour the tokens the draft head proposed")
    add("--json", action="store_true", help="one JSON object a prompt")
    return parser.parse_args(argv)


def generate(args: argparse.Namespace) -> int:
    """Decode the prompts and print their completions."""
    settings = {name: getattr(args, name) for name, _, _ in SAMPLING_OPTIONS}
    options = {
        "max_new_tokens": args.max_new_tokens,
        "stop_strings": args.stop,
        "sampling": SamplingParams(**settings, log_probs=args.log_probs),
    }
    prompts = read_prompts(args.prompts) if args.prompts else [Prompt(args.prompt, args.raw)]
    prompts = [replace(prompt, raw=prompt.raw or args.raw) for prompt in prompts]
    decoder = SpeculativeDecoder.from_bundle(
        args.bundle,
        method=args.method,
        num_nodes=args.num_nodes,
        tree=args.tree,
        num_threads=args.threads,
        step=args.step,
        device=args.device,
        kept_nodes=args.kept_nodes,
    )
    if args.num_nodes is not None:
        bundle = Bundle.load(args.bundle, verify=False)
        _, line = explain_size(bundle, decoder.batch.runner, args.method, args.num_nodes)
        if line:
            print(f"generate: {line}", file=sys.stderr)
    if args.json:
        for prompt in tqdm(prompts, unit="prompt", disable=len(prompts) == 1):
            print(json.dumps(complete(decoder, prompt, options), ensure_ascii=False), flush=True)
        return 0
    for prompt in prompts:
        ids = decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw)
        _print_summary(print_stream(decoder.stream(ids, **options), show_drafts=args.show_drafts))
    return 0


def _print_summary(stats: dict[str, float]) -> None:
    steps, decoded = stats["steps"], stats["tokens"] - 1
    text = f"{stats['tokens']:.0f} tokens, prompt read in {1000 * stats['prefill']:.0f} ms"
    if steps > 0:
        text += (
            f", {1000 * stats['decode'] / decoded:.2f} ms/token, {decoded / steps:.2f} tokens a step, "
            f"{stats['drafted']:.0f} drafted"
        )
    print(text, file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())

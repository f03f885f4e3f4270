"""The work of ``runtime.generate``: decode prompts, and print their texts or one JSON object a line."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from runtime.core.bundle import Bundle
from runtime.core.cli import coloured
from runtime.core.prompts import Prompt
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Chunk, Piece
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.device.plan import explain_size

DRAFTED, RESET = "\033[32m", "\033[0m"
# Of a prompt, this many characters are in the line before its completion.
TITLE_LENGTH = 60


def generate(
    args: argparse.Namespace,
    bundle: Bundle,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    grammar: Grammar | None,
) -> int:
    """Decode the prompts and print their completions; returns the exit status.

    Raises RequestError before the first is decoded if any of them cannot be.
    """
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
    options = {
        "max_new_tokens": args.max_new_tokens,
        "stop_strings": args.stop,
        "sampling": sampling,
        "grammar": grammar,
    }
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
    decoder: SpeculativeDecoder, prompt_ids: Sequence[int], options: dict[str, Any]
) -> dict[str, Any]:
    """One prompt's completion with its statistics."""
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


def print_stream(chunks: Iterable[Chunk], *, show_drafts: bool) -> Printed:
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

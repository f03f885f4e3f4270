"""Engines side by side: the same weights and prompts, one machine, one text at a time on the processor.

    python -m benchmarks.peers --model MODEL_DIR --drafter heads/ctc --prompts a.jsonl --out build/peers
    python -m benchmarks.peers --model model.gguf --prompts a.jsonl --precisions int8 --out build/peers

Converts the model for every engine, opens each in a process of its own, and decodes the prompts greedily
with all of them in turns. Writes to OUT:

    peers.json    "rows", one an engine, precision and method: ms_per_token (the median over prompts) with
                  quartiles, tokens, same_tokens (before the first difference from ours-plain in the same
                  precision), resident_mb, prompt_ms and prompt_tokens_per_s (until the first token comes, the
                  medians over prompts); beside them settings, machine, versions and what was
                  left out
    peers.md      the table
    peers.svg     the same as bars
    models/       the converted models, which the next run uses again
    logs/         what the engines print

An engine that is not installed is left out, with a line that says how to get it. ms_per_token is the time
from the first tokens to the last, by the number of tokens after the first ones, so reading the prompt does
not count. No token ends a text, so all engines write as many. Prompt lookup is each engine's own.

Exits with 2 when the input cannot be used, with 130 for Ctrl-C.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts, names
from benchmarks.peers.engines import DRAFT, ENGINES, METHODS, OURS_PLAIN, PRECISIONS, Engine, Opening
from benchmarks.peers.report import figure, markdown
from benchmarks.peers.worker import Worker, WorkerError
from benchmarks.report import require_matplotlib, write_report
from drafters.config import CONFIG_NAME
from export.options import INT8_SCALES, Options
from export.quantisation.precision import BLOCK_SIZES
from runtime.core.bundle import Bundle
from runtime.core.cli import AUTO, at_least, num_nodes
from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import Prompt
from runtime.core.system import available_cores
from runtime.profiler.measure import WARMUP_TOKENS, turns
from runtime.text import PromptTokenizer

# Threads that wait for work by turning keep a core busy for some milliseconds after an answer.
PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Contender:
    """An engine in one precision with one way of decoding: a row of the table."""

    engine: Engine
    precision: str
    method: str

    def __str__(self) -> str:
        return f"{self.engine.name}, {self.precision}, {self.method}"

    @property
    def is_reference(self) -> bool:
        """Whether the others of its precision are compared with its tokens."""
        return self.engine.name == OURS_PLAIN


@dataclass(frozen=True)
class Run:
    """A prompt decoded once: its number and tokens, and a worker's answer."""

    prompt: int
    prompt_tokens: int
    token_ids: list[int]
    first: int
    prompt_ms: float
    decode_ms: float
    resident_mb: float | None

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds of each token that came after the prompt had been read; None if there is none."""
        decoded = len(self.token_ids) - self.first
        return self.decode_ms / decoded if decoded else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Tokens of the prompt that were read in a second, until the first token came; None if none came."""
        return 1000 * self.prompt_tokens / self.prompt_ms if self.token_ids else None


@dataclass
class Comparison:
    """What is compared, what was measured, and what was left out, a line each."""

    args: argparse.Namespace
    prompts: list[list[int]] = field(default_factory=list)
    paths: dict[Contender, Path] = field(default_factory=dict)
    runs: dict[Contender, list[Run]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, line: str) -> None:
        self.left_out.append(line)
        print(line, file=sys.stderr, flush=True)

    def drop(self, contender: Contender, problem: object) -> None:
        """Go on without a contender that failed, whose rows would be incomplete."""
        self.leave_out(f"{contender}: {problem}")
        self.paths.pop(contender, None)
        self.runs.pop(contender, None)

    def opening(self, contender: Contender) -> Opening:
        return Opening(
            engine=contender.engine.name,
            precision=contender.precision,
            method=contender.method,
            path=str(self.paths[contender].resolve()),
            threads=self.args.threads,
            context=max(map(len, self.prompts)) + self.args.max_new_tokens,
            lookup_tokens=self.args.lookup_tokens,
            num_nodes=self.args.num_nodes,
        )


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.peers", __doc__)
    parser.add("--model", type=Path, required=True, help="Hugging Face model directory, or a GGUF file")
    parser.add("--drafter", type=Path, help="draft head of ours-speculative")
    parser.add("--prompts", "--max-new-tokens", "--repeats", "--threads")
    parser.add("--num-prompts", type=at_least(1), help="use so many prompts from the beginning of a file")
    text = "of the weights, a comma list"
    parser.add("--precisions", type=names(PRECISIONS), default="fp32,int8,int4", help=text)
    text = f"a comma list of {', '.join(ENGINES)}; ours-plain always runs (default all)"
    parser.add_argument("--engines", type=names(ENGINES), default=",".join(ENGINES), help=text)
    text = "ways of decoding, a comma list"
    parser.add("--methods", type=names(METHODS), default=",".join(METHODS), help=text)
    text = "drafts of prompt lookup in llama.cpp, OpenVINO and Transformers"
    parser.add("--lookup-tokens", type=at_least(1), default=4, help=text)
    text = "draft nodes of our steps, or auto"
    parser.add("--num-nodes", type=num_nodes, default=AUTO, help=text)
    text = "what shares a scale in our int8 weights, as in ctc build"
    parser.add("--int8-scales", choices=INT8_SCALES, default=Options.int8_scales, help=text)
    text = "rows that share a scale in our int4 weights, as in ctc build"
    sizes, size = BLOCK_SIZES[::-1], Options.int4_block_size
    parser.add("--int4-block-size", type=int, choices=sizes, default=size, help=text)
    text = "open one engine at a time, anew for every prompt, for models that do not fit in memory many times"
    parser.add_argument("--one-at-a-time", action="store_true", help=text)
    parser.add("--out", help="directory of the report and of the converted models")
    return parser.run(compare, argv)


def our_scales(args: argparse.Namespace) -> dict[str, str]:
    """What shares a scale in our quantised weights, by their precision."""
    return {"int8": args.int8_scales, "int4": str(args.int4_block_size)}


def compare(args: argparse.Namespace) -> int:
    """Measure, write and print the report. Raises UserError for input that cannot be used."""
    from benchmarks.peers.models import Models, hugging_face_directory  # imports torch

    prompts = all_prompts(args.prompts, args.num_prompts)
    require_matplotlib()
    if args.drafter and not (args.drafter / CONFIG_NAME).is_file():
        raise UserError(f"--drafter: {args.drafter} has no {CONFIG_NAME}; expected a draft head's directory")
    args.threads = args.threads or available_cores()
    comparison = Comparison(args)
    found = list(contenders(args, comparison))
    root = args.out / "models"
    models = Models(root, hugging_face_directory(args.model, root), args.drafter, our_scales(args))
    for contender in found:
        try:
            comparison.paths[contender] = models.ensure(
                contender.engine, contender.method, contender.precision
            )
        except WorkerError as error:
            if contender.is_reference:
                raise UserError(f"--model: {error}") from error
            comparison.drop(contender, error)
    comparison.prompts = encode(prompts, next(iter(comparison.paths.values())) / "bundle", args)
    for precision in args.precisions:
        measure(comparison, [c for c in comparison.paths if c.precision == precision])
    return report(comparison)


def contenders(args: argparse.Namespace, comparison: Comparison) -> Iterator[Contender]:
    """What was asked for, precision by precision; ours first, with whose tokens the others are compared."""
    for name in (name for name in ENGINES if name in args.engines):
        missing = ENGINES[name].missing()
        if missing:
            comparison.leave_out(missing)
    for precision in args.precisions:
        for name, engine in ENGINES.items():
            is_asked = name in args.engines or name == OURS_PLAIN
            if not is_asked or engine.missing() or precision not in engine.forms:
                continue
            for method in engine.methods:
                is_wanted = method in args.methods or name == OURS_PLAIN
                if is_wanted and (method != DRAFT or args.drafter):
                    yield Contender(engine, precision, method)


def encode(prompts: Sequence[Prompt], bundle: Path, args: argparse.Namespace) -> list[list[int]]:
    """The token ids that every engine is given: each prompt in the model's chat template."""
    loaded = Bundle.load(bundle, verify=False)
    tokenizer = PromptTokenizer(loaded)
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append([int(token) for token in tokenizer.encode_prompt(prompt)])
        except RequestError as error:
            raise UserError(f"--prompts: prompt {number}: {error}") from error
        length = len(encoded[-1]) + args.max_new_tokens
        if length > loaded.manifest.model.max_position_embeddings:
            raise UserError(f"--prompts: prompt {number} and its answer are longer than the model's context")
    return encoded


def measure(comparison: Comparison, group: Sequence[Contender]) -> None:
    """Decode every prompt with every contender of one precision in turns.

    All their processes are open at a time; with ``one_at_a_time`` each is opened anew for each prompt.
    """
    args = comparison.args
    units = [(repeat, prompt) for repeat in range(args.repeats) for prompt in range(len(comparison.prompts))]
    with ExitStack() as stack:
        workers: dict[Contender, Worker] = {}
        if not args.one_at_a_time:
            for contender in group:
                worker = start(comparison, contender)
                if worker:
                    stack.callback(worker.close)
                    workers[contender] = worker
        for repeat, prompt in tqdm(units, desc=group[0].precision if group else "", unit="prompt"):
            for index in turns(len(group), repeat + prompt):
                contender = group[index]
                if contender not in comparison.paths:
                    continue
                opened = workers.get(contender) or start(comparison, contender)
                if opened is None:
                    continue
                try:
                    decode(comparison, contender, opened, prompt)
                finally:
                    if contender not in workers:
                        opened.close()


def start(comparison: Comparison, contender: Contender) -> Worker | None:
    """Open a contender's process and warm it up; None, and a line, if that fails."""
    names = contender.engine.name, contender.precision, contender.method
    worker = Worker(comparison.args.out / "logs" / f"{'-'.join(names)}.log")
    try:
        worker.open(comparison.opening(contender))
        comparison.versions[contender.engine.name] = worker.version
        worker.decode(comparison.prompts[0], min(comparison.args.max_new_tokens, WARMUP_TOKENS))
    except WorkerError as error:
        worker.close()
        comparison.drop(contender, error)
        return None
    return worker


def decode(comparison: Comparison, contender: Contender, worker: Worker, prompt: int) -> None:
    """Decode one prompt and keep what was measured."""
    time.sleep(PAUSE_SECONDS)
    try:
        answer = worker.decode(comparison.prompts[prompt], comparison.args.max_new_tokens)
    except WorkerError as error:
        comparison.drop(contender, error)
        return
    comparison.runs.setdefault(contender, []).append(Run(prompt, len(comparison.prompts[prompt]), **answer))


def rows(runs: Mapping[Contender, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for every contender."""
    # By precision and prompt: what our plain decoding writes.
    reference: dict[tuple[str, int], list[int]] = {}
    for contender, found in runs.items():
        if contender.is_reference:
            for run in found:
                reference.setdefault((contender.precision, run.prompt), run.token_ids)
    return [row(contender, found, reference) for contender, found in runs.items()]


def row(
    contender: Contender, runs: Sequence[Run], reference: Mapping[tuple[str, int], Sequence[int]]
) -> dict[str, Any]:
    """Medians over prompts, each of its repeats' median; tokens are of one repeat."""
    first = {run.prompt: run for run in reversed(runs)}
    lower, middle, upper = quartiles(by_prompt(runs, "ms_per_token"))
    same = [
        same_beginning(run.token_ids, reference[contender.precision, prompt])
        for prompt, run in first.items()
        if (contender.precision, prompt) in reference
    ]
    tokens = sum(len(run.token_ids) for run in first.values())
    resident = [run.resident_mb for run in runs if run.resident_mb is not None]
    return {
        "engine": contender.engine.name,
        "precision": contender.precision,
        "method": contender.method,
        "ms_per_token": middle,
        "tokens": tokens,
        "same_tokens": sum(same) if same else None,
        "resident_mb": max(resident, default=None),
        "quartiles": [lower, upper],
        "same_share": sum(same) / tokens if same and tokens else None,
        "prompt_ms": quartiles(by_prompt(runs, "prompt_ms"))[1],
        "prompt_tokens_per_s": quartiles(by_prompt(runs, "prompt_tokens_per_s"))[1],
        "prompts": len(first),
        "form": contender.engine.forms[contender.precision],
    }


def by_prompt(runs: Iterable[Run], name: str) -> list[float]:
    """The median of each prompt's repeats."""
    values: dict[int, list[float]] = {}
    for run in runs:
        value = getattr(run, name)
        if value is not None:
            values.setdefault(run.prompt, []).append(value)
    return [statistics.median(repeats) for repeats in values.values()]


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The quartiles, by linear interpolation, rounded; None where there are no values."""
    if not values:
        return None, None, None
    lower, middle, upper = np.percentile(values, [25, 50, 75]).round(4).tolist()
    return lower, middle, upper


def same_beginning(found: Sequence[int], expected: Sequence[int]) -> int:
    """The length of the beginning in which two texts are equal."""
    pairs = zip(found, expected, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected))
    )


def report(comparison: Comparison) -> int:
    """Write and print the results."""
    args = comparison.args
    found = rows(comparison.runs)
    content = {
        "rows": found,
        "settings": {
            "model": str(args.model),
            "drafter": str(args.drafter) if args.drafter else None,
            "prompts": len(comparison.prompts),
            "prompt_tokens": statistics.median(map(len, comparison.prompts)),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "threads": args.threads,
            "lookup_tokens": args.lookup_tokens,
            "num_nodes": args.num_nodes or AUTO,
            "our_scales": our_scales(args),
            "one_at_a_time": args.one_at_a_time,
        },
        "engine_versions": comparison.versions,
        "left_out": comparison.left_out,
    }
    text = markdown(content)
    paths = write_report(args, "peers.json", content, texts={"peers.md": text, "peers.svg": figure(found)})
    print(text)
    print("wrote " + ", ".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())

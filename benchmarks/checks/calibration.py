"""Are a draft's probabilities right? psi of every tree node against whether it was accepted.

    python -m benchmarks.checks.calibration --bundle build/demo/bundle --prompts a.jsonl --out build/calib
    python -m benchmarks.checks.calibration --bundle build/demo/bundle --prompts a.jsonl --out build/fit --fit

psi of a node is the probability that the draft begins with the node's path; the sum over a tree is how
many drafts a step is expected to accept, by which a tree's size can be chosen. Decodes the prompts
greedily and writes ``calibration.json`` (reliability in ten bins of equal count, expected calibration
error, expected and measured tokens per step) and ``reliability.svg``: for psi as the head states it and,
where the bundle carries a calibration or ``--fit`` finds one, for psi' = sigmoid(a logit(psi) + b), with
the same b throughout and with b following what is accepted of each text, as the decoder has it.

The last step of every prompt is left out: the token limit may cut it.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import Parser, check_out, read_prompt_files, require_matplotlib
from benchmarks.checks.reliability import Nodes, accepted_nodes, describe, followed, measured_beta
from runtime.budget.calibration import calibrate
from runtime.bundle import Bundle
from runtime.cli import at_least, exit_status
from runtime.decoder import SpeculativeDecoder
from runtime.errors import RequestError, UserError
from runtime.load import TRANSFORMS
from runtime.profiler.environment import describe_bundle, versions
from runtime.profiler.files import write_files
from runtime.proposers.base import Proposer
from runtime.trees.token_tree import TokenTree
from training.calibration import fit_calibration


class RecordingDrafter:
    """Passes everything on to a draft head and keeps the trees it makes."""

    def __init__(self, inner: Proposer):
        self._inner = inner
        self.trees: list[TokenTree] = []

    def reset(self, row: int) -> None:
        self._inner.reset(row)

    def move(self, source: int, target: int) -> None:
        self._inner.move(source, target)

    def observe(self, *args: Any) -> None:
        self._inner.observe(*args)

    def draft(self, anchors: Sequence[int], num_nodes: int) -> Sequence[Any]:
        return self._inner.draft(anchors, num_nodes)

    def transform(self, proposal: Any, *, anchor: int, num_nodes: int) -> TokenTree:
        self.trees.append(self._inner.transform(proposal, anchor=anchor, num_nodes=num_nodes))
        return self.trees[-1]


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 2 for input that cannot be used, 130 for Ctrl-C."""
    return exit_status("calibration", lambda: measure(parse_args(sys.argv[1:] if argv is None else argv)))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.checks.calibration", __doc__)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle, with a draft head")
    add("--prompts", type=Path, nargs="+", required=True, help="jsonl; turns, question, prompt or text")
    add("--nodes", type=at_least(1), default=16, help="draft nodes a step (default %(default)s)")
    add(
        "--transform",
        choices=tuple(TRANSFORMS),
        default="prefix",
        help="lattice to tree (default %(default)s)",
    )
    add("--max-new-tokens", type=at_least(2), default=128, help="tokens per prompt (default %(default)s)")
    add("--max-prompts", type=at_least(1), help="use the first prompts of every file only")
    add("--threads", type=at_least(1), help="threads per engine (default: the available cores)")
    add(
        "--fit",
        action="store_true",
        help="fit a and b on these prompts, whatever the bundle has, and print them",
    )
    add("--out", type=Path, required=True, help="directory of calibration.json and reliability.svg")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> int:
    """Decode, compare, write, print; 0."""
    require_matplotlib()
    check_out(args.out)
    files = read_prompt_files(args.prompts, args.max_prompts)
    bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
    if bundle.manifest.drafter is None:
        raise UserError(f"--bundle: {args.bundle} has no draft head")
    decoder = SpeculativeDecoder.from_bundle(
        args.bundle, num_nodes=args.nodes, transform=args.transform, num_threads=args.threads
    )
    prompts = []
    for name, rows in files.items():
        for number, row in enumerate(rows, 1):
            try:
                prompts.append(decoder.prompt_tokenizer.encode(row.text, raw=row.raw))
                decoder.stream(prompts[-1], max_new_tokens=args.max_new_tokens)  # checks, runs nothing
            except RequestError as error:
                raise UserError(f"--prompts: {name}, prompt {number}: {error}") from error
    pair = getattr(bundle.manifest.drafter, "calibration", None)
    nodes = collect(decoder, prompts, args.max_new_tokens)
    report = build_report(nodes, pair, fit=args.fit)
    report |= {
        "bundle": describe_bundle(bundle),
        "settings": {
            "prompts": {name: len(rows) for name, rows in files.items()},
            "nodes": args.nodes,
            "transform": args.transform,
            "max_new_tokens": args.max_new_tokens,
        },
        "versions": versions(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    paths = write_files(args.out, texts(report))
    print(summary(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return 0


def collect(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> Nodes:
    """Decode the prompts and return every node of every whole step."""
    recording = RecordingDrafter(decoder.batch.drafter)
    decoder.batch.drafter = recording
    log_psi, accepted, texts = [], [], []
    try:
        for prompt in tqdm(prompts, desc="calibration", unit="prompt"):
            recording.trees.clear()
            chunks = [c.token_ids for c in decoder.stream(prompt, max_new_tokens=max_new_tokens)]
            output = np.array([token for chunk in chunks for token in chunk], np.int64)
            # Tree i was drafted behind the last token of chunk i.
            starts = np.cumsum([len(chunk) for chunk in chunks])
            texts.append(len(recording.trees[:-1]))
            for tree, start in zip(recording.trees[:-1], starts, strict=False):
                log_psi.append(tree.log_probs[1:])
                accepted.append(accepted_nodes(tree, output[start:]))
    finally:
        decoder.batch.drafter = recording._inner
    sizes = np.array([part.size for part in accepted], np.int64)
    if not sizes.sum():
        raise UserError("--prompts: no output is longer than two steps, so there is nothing to compare")
    return Nodes(np.exp(np.concatenate(log_psi)), np.concatenate(accepted), sizes, np.array(texts, np.int64))


def build_report(nodes: Nodes, pair: Sequence[float] | None, *, fit: bool) -> dict[str, Any]:
    """What was found before calibration and, where there is one, after it and as it follows each text.

    pair: the bundle's own; with ``fit`` the one fitted on these nodes takes its place, and its "after"
    is on the nodes it was fitted on.
    """
    fitted = fit_calibration(nodes.psi, nodes.accepted) if fit else None
    used = fitted or pair
    return {
        "measured_beta": measured_beta(nodes),
        "steps": int(nodes.sizes.size),
        "nodes": int(nodes.psi.size),
        "calibration": None if used is None else list(used),
        "fitted_here": fitted is not None,
        "before": describe(nodes, nodes.psi),
        "after": None if used is None else describe(nodes, calibrate(nodes.psi, *used)),
        "following": None if used is None else describe(nodes, followed(nodes, *used)),
    }


def texts(report: Mapping[str, Any]) -> dict[str, str]:
    """The files of OUT by name."""
    # matplotlib takes a second to import: not before there is something to draw.
    from benchmarks.checks.reliability_plot import reliability_plot

    curves = {"as stated": report["before"]["bins"]}
    if report["after"] is not None:
        curves["calibrated"] = report["after"]["bins"]
        curves["following the text"] = report["following"]["bins"]
    return {
        "calibration.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "reliability.svg": reliability_plot(curves),
    }


def summary(report: Mapping[str, Any]) -> str:
    """The numbers as the command prints them."""
    lines = [f"{'':<20}{'expected beta':>14}{'measured':>10}{'ECE':>9}"]
    rows = {"as stated": "before", "calibrated": "after", "following the text": "following"}
    for name, key in rows.items():
        found = report[key]
        if found is not None:
            values = f"{found['expected_beta']:>14.3f}{report['measured_beta']:>10.3f}{found['ece']:>9.4f}"
            lines.append(f"{name:<20}{values}")
    lines += ["", f"{'mean psi':>10}{'accepted':>10}{'nodes':>8}"]
    for part in report["before"]["bins"]:
        lines.append(f"{part['psi']:>10.4f}{part['accepted']:>10.4f}{part['count']:>8}")
    if report["calibration"] is not None:
        a, b = report["calibration"]
        origin = "fitted on these prompts" if report["fitted_here"] else "the bundle's"
        lines += ["", f"a = {a:.4f}, b = {b:.4f} ({origin})"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

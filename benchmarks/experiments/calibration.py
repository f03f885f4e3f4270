"""Compares the prefix probability of every draft node with whether the node was accepted.

    python -m benchmarks.experiments.calibration --bundle build/demo/bundle --prompts a.jsonl --out build/cal
    python -m benchmarks.experiments.calibration --bundle build/demo/bundle --prompts a.jsonl --fit --out DIR

A node's prefix probability (psi) is the probability that the draft begins with the node's path. The sum over
a tree is the number of drafts that a step is expected to accept, from which the decoder chooses the size of
the tree. The command decodes the prompts greedily and writes ``calibration.json`` (reliability in ten bins of
equal count, expected calibration error, expected and measured tokens per step) and ``reliability.svg``. Both
have psi as the head states it. If the bundle has a calibration, or ``--fit`` finds one, they also have the
acceptance probability sigmoid(a logit(psi) + b): once with a constant b, and once with a b that follows what
is accepted of each text, as in the decoder.

The last step of every prompt is left out, because the token limit may cut it.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.arguments import Parser, read_prompt_files
from benchmarks.report import INK, draw, looks, require_matplotlib, write_report
from runtime.core.baselines import SEARCHES
from runtime.core.bundle import Bundle
from runtime.core.calibration import RunningCalibration, calibrate
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.engines.recorder import Recorder
from runtime.profiler.measure import host_step
from training.loop.evaluation import fit_calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Parts of the report, and what tables and the diagram call them.
NAMES = {"before": "as stated", "after": "calibrated", "following": "following the text"}
NUM_BINS = 10


@dataclass(frozen=True)
class Nodes:
    """The draft nodes of many verify steps, in the order of the steps.

    probabilities: [M] float64, prefix probability: the probability that the draft begins with the node's path
    accepted: [M] bool, whether the target model wrote that path
    sizes: [S] int64, nodes of each step
    texts: [P] int64, steps of each prompt's text
    """

    probabilities: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    texts: NDArray[np.int64]

    @property
    def measured_acceptance_length(self) -> float:
        """Tokens per step: the accepted drafts and the target model's own token."""
        return 1 + float(self.accepted.sum()) / self.sizes.size


def accepted_nodes(tree: TokenTree, continuation: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for every draft node whether the text after the root begins with its path: [N] bool.

    continuation: [L] int64, that text; a path that is longer is not accepted
    Example: drafts "a", "ab", "ac", "b", continuation "abd" -> True, True, False, False.
    """
    accepted = np.ones(len(tree), np.bool_)
    for node in range(1, len(tree)):  # a child always comes after its parent
        position = int(tree.depths[node]) - 1
        fits = position < continuation.size and tree.tokens[node] == continuation[position]
        accepted[node] = fits and accepted[tree.parents[node]]
    return accepted[1:]


def followed(nodes: Nodes, a: float, b: float) -> NDArray[np.float64]:
    """Return the running calibration's prediction for every node before its step is verified, [M]."""
    predicted = []
    ends = np.cumsum(nodes.sizes)
    starts_of_texts = {0, *np.cumsum(nodes.texts).tolist()}
    for step, (end, size) in enumerate(zip(ends, nodes.sizes, strict=True)):
        if step in starts_of_texts:
            calibration = RunningCalibration(a, b)
        predicted.append(calibration.predict(nodes.probabilities[end - size : end]))
        calibration.update(predicted[-1], np.count_nonzero(nodes.accepted[end - size : end]))
    return np.concatenate(predicted)


def reliability(probabilities: NDArray[np.float64], accepted: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Return mean probability ("psi"), share accepted and count of ten equal bins, the lowest first.

    With fewer than ten nodes, each has a bin of its own.
    Example: .1 .2, the second accepted -> (.1, 0, 1), (.2, 1, 1)
    """
    order = np.argsort(probabilities, kind="stable")
    return [
        {"psi": float(probabilities[p].mean()), "accepted": float(accepted[p].mean()), "count": int(p.size)}
        for p in np.array_split(order, min(NUM_BINS, order.size))
    ]


def describe(nodes: Nodes, probabilities: NDArray[np.float64]) -> dict[str, Any]:
    """Return reliability, expected calibration error and expected acceptance under ``probabilities`` [M].

    ece: mean over nodes of the gap between a bin's mean probability and its share accepted
    expected_beta: the acceptance length if the probabilities were right: 1 + their sum over a step's nodes,
        the mean over the steps
    """
    bins = reliability(probabilities, nodes.accepted)
    gaps = [abs(part["psi"] - part["accepted"]) * part["count"] for part in bins]
    return {
        "bins": bins,
        "ece": sum(gaps) / probabilities.size,
        "expected_beta": 1 + float(probabilities.sum()) / nodes.sizes.size,
    }


def reliability_diagram(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Draw the share accepted against the mean probability, both logarithmic, as an SVG text.

    Right probabilities lie on the diagonal. A bin of which nothing was accepted is drawn hollow at half an
    acceptance, because zero has no logarithm.
    curves: name -> bins of ``reliability``
    """
    styles = looks(list(curves))

    def fill(axes: Sequence["Axes"]) -> None:
        (axis,) = axes
        low = 1.0
        for name, bins in curves.items():
            xs = [part["psi"] for part in bins]
            shares = [part["accepted"] or 0.5 / part["count"] for part in bins]
            axis.plot(xs, shares, **{**styles[name], "marker": ""})
            for x, y, part in zip(xs, shares, bins, strict=True):
                face = styles[name]["color"] if part["accepted"] else "white"
                axis.plot(x, y, **{**styles[name], "linestyle": ""}, markerfacecolor=face)
            low = min(low, *xs, *shares)
        axis.set(xscale="log", yscale="log", xlim=(low / 1.5, 1.3), ylim=(low / 1.5, 1.3))
        axis.plot([low / 1.5, 1], [low / 1.5, 1], color=INK, linewidth=0.8, linestyle=":", zorder=0)
        axis.set_xlabel("mean prefix probability of a tenth of the nodes")
        axis.set_ylabel("share accepted")

    return draw(["Are the draft's probabilities right?"], fill, styles)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.calibration", __doc__)
    parser.add("--bundle", help="engine bundle, with a draft head")
    parser.add("--prompts", "--max-prompts", "--max-new-tokens", "--threads", "--search")
    parser.add("--nodes", type=at_least(1), default=16, help="draft nodes a step")
    fit = "fit a and b on these prompts, whatever the bundle has, and print them"
    parser.add("--fit", action="store_true", help=fit)
    parser.add("--out", help="directory of calibration.json and reliability.svg")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Decode the prompts, write and print the report, and return 0."""
    require_matplotlib()
    files = read_prompt_files(args.prompts, args.max_prompts)
    bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
    if bundle.manifest.drafter is None:
        raise UserError(f"--bundle: {args.bundle} has no draft head")
    decoder = SpeculativeDecoder.from_bundle(
        args.bundle, num_nodes=args.nodes, search=SEARCHES[args.search], num_threads=args.threads
    )
    limit = args.max_new_tokens
    prompts = []
    for name, rows in files.items():
        prompts += encode_prompts(decoder, rows, max_new_tokens=limit, where=f"--prompts: {name},")
    pair = getattr(bundle.manifest.drafter, "calibration", None)
    report = build_report(collect(decoder, prompts, limit), pair, fit=args.fit)
    report["settings"] = {
        "prompts": {name: len(rows) for name, rows in files.items()},
        **{key: getattr(args, key) for key in ("nodes", "search", "max_new_tokens")},
    }
    curves = {name: report[key]["bins"] for key, name in NAMES.items() if report[key] is not None}
    diagram = reliability_diagram(curves)
    paths = write_report(args, "calibration.json", report, bundle=bundle, texts={"reliability.svg": diagram})
    print(summary(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return 0


def collect(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Nodes:
    """Decode the prompts and return every node of every whole step."""
    proposer = host_step(decoder).proposer
    propose = proposer.propose
    trees: list[TokenTree] = []

    def propose_and_record(last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        found = propose(last_tokens, num_nodes, recorder)
        trees.extend(found)
        return found

    proposer.propose = propose_and_record  # type: ignore[method-assign]
    log_probs, accepted, texts = [], [], []
    try:
        for prompt in tqdm(prompts, desc="calibration", unit="prompt"):
            trees.clear()
            chunks = [c.token_ids for c in decoder.stream(prompt, max_new_tokens=max_new_tokens)]
            output = np.array([token for chunk in chunks for token in chunk], np.int64)
            # Tree i was drafted behind the last token of chunk i.
            starts = np.cumsum([len(chunk) for chunk in chunks])
            texts.append(len(trees[:-1]))
            for tree, start in zip(trees[:-1], starts, strict=False):
                log_probs.append(tree.log_probs[1:])
                accepted.append(accepted_nodes(tree, output[start:]))
    finally:
        proposer.propose = propose  # type: ignore[method-assign]
    sizes = np.array([part.size for part in accepted], np.int64)
    if not sizes.sum():
        raise UserError("--prompts: no output is longer than two steps, so there is nothing to compare")
    probabilities = np.exp(np.concatenate(log_probs))
    return Nodes(probabilities, np.concatenate(accepted), sizes, np.array(texts, np.int64))


def build_report(nodes: Nodes, pair: Sequence[float] | None, *, fit: bool) -> dict[str, Any]:
    """Describe the probabilities as stated and, where there is a calibration, calibrated and following texts.

    pair: the bundle's (a, b). With ``fit`` a pair is fitted on these nodes instead, and "after" describes
        the nodes it was fitted on.
    """
    stated = nodes.probabilities
    used = fit_calibration(stated, nodes.accepted) if fit else pair
    return {
        "measured_beta": nodes.measured_acceptance_length,
        "steps": int(nodes.sizes.size),
        "nodes": int(stated.size),
        "calibration": None if used is None else list(used),
        "fitted_here": fit,
        "before": describe(nodes, stated),
        "after": None if used is None else describe(nodes, calibrate(stated, *used)),
        "following": None if used is None else describe(nodes, followed(nodes, *used)),
    }


def summary(report: Mapping[str, Any]) -> str:
    """Format the numbers as the command prints them."""
    lines = [f"{'tokens per step':<20}{'expected':>10}{'measured':>10}{'ECE':>9}"]
    for key, name in NAMES.items():
        found = report[key]
        if found is not None:
            values = f"{found['expected_beta']:>10.3f}{report['measured_beta']:>10.3f}{found['ece']:>9.4f}"
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
    raise SystemExit(main())

"""From measured runs to the numbers of a comparison; pure functions. Times are milliseconds.

"beta" is the acceptance length: tokens emitted by verify steps per verify step. Neither the first token,
which comes from reading the prompt, nor what the token limit cuts off the last step counts. "gamma" is
the speedup over plain decoding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from benchmarks.methods.heads import Head
from benchmarks.methods.runs import Outcome, Record, plain_method
from runtime.core.errors import UserError
from runtime.profiler.report import acceptance_by_depth, acceptance_length, ms_per_token

ROW_KEYS = ("method", "prompts", "nodes", "beta", "gamma", "draft_ms", "verify_ms", "params", "lossless")
SPREAD_KEYS = ("beta", "beta_paper", "gamma", "draft_ms", "verify_ms")
DIGITS = 4


@dataclass(frozen=True)
class Sample:
    """One method with one tree size on one prompt file: its outcomes beside plain decoding's.

    prompts: index of the prompt of each outcome; with repeats it occurs several times
    """

    prompts: list[int]
    outcomes: list[Outcome]
    plain: list[Outcome]

    @property
    def by_prompt(self) -> list[tuple[int, Outcome]]:
        return list(zip(self.prompts, self.outcomes, strict=True))


def papers_count(outcomes: Sequence[Outcome]) -> float | None:
    """Return the seed paper's beta, which counts one step a prompt too few; for comparison with its tables.

    Its scripts divide by the index of the last step, counted from zero, and average over the prompts.
    Prompts of a single step are left out; None when there is no other.
    Example: 7 tokens in 2 steps and 8 in 4 -> (6 / 1 + 7 / 3) / 2.
    """
    values = [o.num_decoded / (o.num_steps - 1) for o in outcomes if o.num_steps > 1]
    return float(np.mean(values)) if values else None


def tree_ms(outcome: Outcome) -> list[float]:
    """Return every step's time until the tree can be verified, which is what a draft costs.

    It is the sum of the stages ``draft`` and ``search``: an autoregressive head runs its first pass in
    ``draft`` and the others, which extend the tree, in ``search``.
    """
    return [draft + search for draft, search in zip(outcome.draft_ms, outcome.search_ms, strict=True)]


def detail(head: Head, nodes: int, prompts: str, sample: Sample) -> dict[str, Any]:
    """Return one row of the table with all its numbers. ``lossless`` is identical outputs / prompts."""
    outcomes = sample.outcomes
    differences = [(p, o.difference) for p, o in sample.by_prompt if o.difference is not None]
    differing = {p for p, _ in differences}
    wrong = {p for p, o in sample.by_prompt if o.is_mismatch}
    count = len(set(sample.prompts))
    found = {
        "method": head.label,
        "prompts": prompts,
        "nodes": nodes,
        "beta": acceptance_length(outcomes),
        "beta_paper": papers_count(outcomes),
        "gamma": ms_per_token(sample.plain) / ms_per_token(outcomes),
        "ms_per_token": ms_per_token(outcomes),
        "draft_ms": _median(tree_ms(o) for o in outcomes),
        "verify_ms": _median(o.verify_ms for o in outcomes),
        "params": head.params,
        "lossless": f"{count - len(differing)}/{count}",
        "ties": len(differing - wrong),
        "mismatches": len(wrong),
        "num_steps": sum(o.num_steps for o in outcomes),
        "num_tokens": sum(o.num_decoded for o in outcomes),
        "acceptance_by_depth": acceptance_by_depth([n for o in outcomes for n in o.accepted]),
        "seed": head.seed,
    }
    # Differences are not rounded, because a gap decides what is a tie.
    return {**rounded(found), "differences": [{"prompt": p, **difference} for p, difference in differences]}


def row(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nine keys of a row."""
    return {key: details[key] for key in ROW_KEYS}


def plain_row(prompts: str, plain: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of one plain decoding on one prompt file."""
    return rounded(
        {
            "method": plain[0].method,
            "prompts": prompts,
            "num_prompts": len(plain),
            "ms_per_token": ms_per_token(plain),
            "verify_ms": _median(o.verify_ms for o in plain),
        }
    )


def aggregate(details: Sequence[Mapping[str, Any]], methods: Mapping[str, str]) -> list[dict[str, Any]]:
    """Put the seeds of each method together: mean, min and max over its heads.

    methods: label of a head -> method
    """
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for found in details:
        groups.setdefault((found["prompts"], methods[found["method"]], found["nodes"]), []).append(found)
    table = []
    for (prompts, method, nodes), group in groups.items():
        identical, count = zip(*(map(int, found["lossless"].split("/")) for found in group), strict=True)
        table.append(
            {
                "method": method,
                "prompts": prompts,
                "nodes": nodes,
                "heads": [found["method"] for found in group],
                **{key: _mean_min_max([found[key] for found in group]) for key in SPREAD_KEYS},
                "params": group[0]["params"],
                "lossless": f"{sum(identical)}/{sum(count)}",
                "ties": sum(found["ties"] for found in group),
                "mismatches": sum(found["mismatches"] for found in group),
                "acceptance_by_depth": _mean_depths([found["acceptance_by_depth"] for found in group]),
            }
        )
    return table


def ratios(rows: Sequence[Mapping[str, Any]], method: str) -> list[dict[str, Any]]:
    """Divide one method's acceptance length by every other's, by tree size; means over the prompt files.

    rows: of ``aggregate``. ``mean`` divides the means over seeds; ``min`` is the method's lowest seed over
    the other's highest, ``max`` its highest over the other's lowest.
    """
    lengths = {(row["method"], row["prompts"], row["nodes"]): row["beta"] for row in rows}
    methods, files, sizes = (list(dict.fromkeys(column)) for column in zip(*lengths, strict=True))
    table = []
    for other in methods:
        if other == method:
            continue
        found: list[dict[str, Any]] = [{"nodes": nodes} for nodes in sizes]
        for entry in found:
            pairs = [
                (lengths[method, name, entry["nodes"]], lengths[other, name, entry["nodes"]])
                for name in files
            ]
            for bound, opposite in (("mean", "mean"), ("min", "max"), ("max", "min")):
                entry[bound] = _mean([own[bound] / theirs[opposite] for own, theirs in pairs])
        mean = _mean([entry["mean"] for entry in found])
        table.append({"method": method, "other": other, "by_nodes": found, "mean": mean})
    return table


def best_sizes(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the row of ``aggregate`` with the highest speedup for every method and prompt file."""
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["prompts"], row["method"])
        if key not in best or row["gamma"]["mean"] > best[key]["gamma"]["mean"]:
            best[key] = row
    return list(best.values())


def by_category(
    samples: Mapping[str, Sample], methods: Mapping[str, str], categories: Sequence[str | None]
) -> dict[str, dict[str, float]]:
    """Return acceptance lengths by method and category, means over a method's heads; {} without categories.

    samples: by the heads' labels; categories: by prompt
    """
    lengths: dict[str, dict[str, list[float]]] = {}
    for name in sorted({category for category in categories if category is not None}):
        for label, sample in samples.items():
            inside = [o for p, o in sample.by_prompt if categories[p] == name]
            if any(o.num_steps for o in inside):
                of_method = lengths.setdefault(methods[label], {})
                of_method.setdefault(name, []).append(acceptance_length(inside))
    return {
        method: {name: _mean(values) for name, values in found.items()} for method, found in lengths.items()
    }


def collect(records: Iterable[Record], prompts: str) -> dict[tuple[str, int], Sample]:
    """Group a file's outcomes by (label, nodes), each beside the plain decoding that it is compared with.

    Raises UserError when no output of the file has a second token, so that nothing was timed.
    """
    samples: dict[tuple[str, int], Sample] = {}
    for record in records:
        plain = {outcome.method: outcome for outcome in record.outcomes if not outcome.nodes}
        for own in record.outcomes:
            if own.nodes:
                sample = samples.setdefault((own.method, own.nodes), Sample([], [], []))
                sample.prompts.append(record.unit.prompt)
                sample.outcomes.append(own)
                sample.plain.append(plain[plain_method(own.method, plain)])
    for sample in samples.values():
        if not all(any(o.num_decoded for o in outcomes) for outcomes in (sample.plain, sample.outcomes)):
            raise UserError(
                f"--prompts: every output of {prompts} ends with its first token; nothing to time"
            )
    return samples


def rounded(value: Any) -> Any:
    """Round all floats of a nested structure to ``DIGITS`` digits."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def _median(values: Iterable[Sequence[float]]) -> float:
    """Return the median over the steps of all outcomes."""
    return float(np.median([value for steps in values for value in steps]))


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), DIGITS)


def _mean_min_max(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"mean": _mean(known), "min": min(known), "max": max(known)} if known else None


def _mean_depths(tables: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """Return shares of steps that accepted depth 1, 2, ..., means over heads; 0 beyond a head's deepest."""
    columns = zip_longest(*([entry["accepted"] for entry in table] for table in tables), fillvalue=0.0)
    return [_mean(column) for column in columns]

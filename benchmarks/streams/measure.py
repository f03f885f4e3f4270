"""Decoding every prompt with plain decoding and with every way of a sweep, in turn."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.streams.sweep import Point
from runtime.core.bundle import Bundle
from runtime.core.prompts import Prompt
from runtime.decode.budget import FixedBudget
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.measure import Setting, compare_outputs, encode_prompts, measure_runs
from runtime.profiler.report import acceptance_length, ms_per_token
from runtime.profiler.runs import PLAIN, Difference, Run


def measure(
    points: Sequence[Point],
    bundles: Mapping[tuple[str, int, str], Path],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    num_nodes: int,
    max_new_tokens: int,
    num_threads: int | None,
) -> list[dict[str, Any]]:
    """One row for every prompt file and point, with trees of ``num_nodes`` drafts.

    bundles: by ``Point.bundle``; prompts: by file
    """
    with contextlib.ExitStack() as opened:

        def load(path: Path, **options: Any) -> SpeculativeDecoder:
            return opened.enter_context(
                contextlib.closing(
                    SpeculativeDecoder.from_bundle(path, num_threads=num_threads, verify=False, **options)
                )
            )

        first = bundles[points[0].bundle]
        plain = load(first, method="plain")
        # A way that belongs to several sweeps is run for each: what differs between them is the noise.
        settings = [Setting(PLAIN, plain)] + [
            Setting(
                point.name,
                load(bundles[point.bundle], kept_nodes=point.kept_nodes),
                FixedBudget(num_nodes),
            )
            for point in points
        ]
        rows = []
        for name, texts in prompts.items():
            encoded = encode_prompts(plain, texts, max_new_tokens=max_new_tokens, where=f"--prompts: {name},")
            runs = measure_runs(settings, encoded, max_new_tokens=max_new_tokens, warmup=1)
            found = compare_outputs(Bundle.load(first, verify=False), encoded, runs, num_threads=num_threads)
            rows += [row(name, point, runs, found) for point in points]
        return rows


def row(prompts: str, point: Point, runs: Sequence[Run], differences: Sequence[Difference]) -> dict[str, Any]:
    """What a point gave on a prompt file.

    beta: tokens per verify step; speedup: over plain decoding
    evaluations: rows that pass a layer, for every token
    draft_ms, verify_ms: the passes that draft and verify, medians; there is one where streams have no pass
        of their own
    ties, mismatches: outputs that are not plain's
    """
    own = [run for run in runs if run.setting == point.name]
    plain = [run for run in runs if run.setting == PLAIN]
    steps = [step for run in own for step in run.steps]
    wrong = [difference for difference in differences if difference.setting == point.name]
    tokens = sum(run.num_decoded for run in own)
    evaluations = sum(point.layer_evaluations(step.num_nodes) for step in steps) / tokens
    return {
        "prompts": prompts,
        **asdict(point),
        "beta": acceptance_length(own),
        "speedup": ms_per_token(plain) / ms_per_token(own),
        "evaluations": evaluations + point.repeated_evaluations,
        **{f"{stage}_ms": median(step.stage_ms(stage) for step in steps) for stage in ("draft", "verify")},
        "num_prompts": len(own),
        "ties": sum(difference.is_tie for difference in wrong),
        "mismatches": sum(not difference.is_tie for difference in wrong),
    }

"""The report's numbers from literal runs, and the files made of them."""

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from runtime.engines.recorder import StepRecord
from runtime.profiler import report_html
from runtime.profiler.report import (
    PLAIN_TRACK,
    SPECULATIVE_TRACK,
    acceptance_by_depth,
    build_report,
    build_trace,
    explanation,
    format_report,
    lossless,
    median_ms_per_token,
    spread,
    stage_durations,
)
from runtime.profiler.report_html import render
from runtime.profiler.runs import PLAIN, Difference, Run, find_differences, is_tie

MS = 1_000_000
VERSIONS = {"python": "3.11.0", "project": "0.1.0", "onnxruntime": "1.24.1"}
CONTEXT: dict[str, Any] = {
    "bundle": {"model": "demo <20M>", "drafter_type": "ctc", "sha256": "00"},
    "settings": {"num_prompts": 2, "max_new_tokens": 5, "verify_prefix_length": 7},
    "command": "python -m runtime.profiler",
    "machine": {"cpu": "A & B", "threads": 2},
    "versions": {"python": "3.10.0"},
}


def make_step(begin: int, *, nodes: int = 5, accepted: int = 1) -> StepRecord:
    """A step of 10 ms: draft 1, search 0.5, verify 7, accept 0.25, commit 0.75, other 0.5."""
    ends = [("draft", 1.0), ("search", 1.5), ("verify", 8.5), ("accept", 8.75), ("commit", 9.5)]
    stages = tuple((stage, begin + int(end * MS)) for stage, end in ends)
    return StepRecord(begin, stages, begin + 10 * MS, 1, nodes, accepted)


def make_run(setting: int | str, prompt: int, token_ids: list[int], *, num_steps: int) -> Run:
    """A prefill of 3 ms, then steps of 10 ms each; the request begins at 1000 ms."""
    first = 1003 * MS
    accepted = 0 if setting == PLAIN else 1
    steps = tuple(make_step(first + index * 10 * MS, accepted=accepted) for index in range(num_steps))
    end = first + num_steps * 10 * MS
    return Run(setting, prompt, 7, tuple(token_ids), 1000 * MS, first, end, steps)


def test_a_slow_repeat_does_not_count() -> None:
    """Of a prompt's repeats the median is taken; another prompt counts as much as its tokens."""
    repeats = [make_run(4, 0, [1, 2, 3, 4, 5], num_steps=2) for _ in range(3)]
    repeats[1] = replace(repeats[1], end_ns=repeats[1].end_ns + 500 * MS)
    other = make_run(4, 1, [1, 2], num_steps=1)
    assert median_ms_per_token([*repeats, other, other]) == pytest.approx((20 + 10) / (4 + 1))


@pytest.fixture
def runs() -> list[Run]:
    """Two prompts: five tokens, in 4 plain steps or 2 speculative ones; and one that ends at once."""
    return [
        make_run(PLAIN, 0, [1, 2, 3, 4, 5], num_steps=4),
        make_run(4, 0, [1, 2, 3, 4, 5], num_steps=2),
        make_run(8, 0, [1, 2, 3, 4, 5], num_steps=3),
        make_run(PLAIN, 1, [9], num_steps=0),
        make_run(4, 1, [9], num_steps=0),
        make_run(8, 1, [9], num_steps=0),
    ]


@pytest.fixture
def report(runs: list[Run]) -> dict[str, Any]:
    return build_report(runs, [], verify_ms={1: [1.0, 3.0], 4: [4.0]}, context=CONTEXT)


def test_spread_is_the_docstring_example() -> None:
    assert spread([1, 3]) == pytest.approx({"p50": 2.0, "p95": 2.9, "mean": 2.0})


def test_stage_durations_leave_the_rest_to_other() -> None:
    expected = {"draft": 1, "search": 0.5, "verify": 7, "accept": 0.25, "commit": 0.75, "other": 0.5}
    assert stage_durations(make_step(5 * MS)) == pytest.approx(expected)


def test_acceptance_by_depth_is_the_docstring_example() -> None:
    rows = acceptance_by_depth([0, 1, 2, 2])
    assert [row["depth"] for row in rows] == [1, 2]
    assert [row["accepted"] for row in rows] == pytest.approx([0.75, 0.5])
    assert [row["conditional"] for row in rows] == pytest.approx([0.75, 2 / 3])


@pytest.mark.parametrize("num_accepted", [[], [0, 0]])
def test_acceptance_by_depth_without_any_acceptance(num_accepted: list[int]) -> None:
    assert acceptance_by_depth(num_accepted) == []


def test_speed_counts_neither_the_prefill_nor_its_token(report: dict[str, Any]) -> None:
    assert report["vanilla"]["ms_per_token"] == pytest.approx(10)
    assert report["vanilla"]["beta"] == 1
    assert report["vanilla"]["prefill_ms"]["p50"] == pytest.approx(3)
    assert report["speculative"]["ms_per_token"] == pytest.approx(5)
    assert report["speculative"]["beta"] == 2
    assert report["speculative"]["gamma"] == pytest.approx(2)


def test_the_fastest_size_is_reported_and_all_are_listed(report: dict[str, Any]) -> None:
    sizes = report["speculative"]["by_num_nodes"]
    assert report["speculative"]["num_nodes"] == 4
    assert list(sizes) == ["4", "8"]
    assert sizes["8"]["gamma"] == pytest.approx(4 / 3)


def test_stages_and_their_shares(report: dict[str, Any]) -> None:
    stages = report["speculative"]["stages_ms"]
    assert list(stages) == ["draft", "search", "verify", "accept", "commit", "other"]
    assert stages["verify"]["p50"] == stages["verify"]["p95"] == pytest.approx(7)
    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    assert report["speculative"]["host_share"] == pytest.approx(0.2)


def test_a_prompt_that_ends_with_its_first_token_has_no_speed(report: dict[str, Any]) -> None:
    first, second = report["prompts"]
    assert first["speedup"] == pytest.approx(2)
    assert (first["prompt_tokens"], first["new_tokens"], first["beta"]) == (7, 5, 2)
    assert second["new_tokens"] == 1
    assert second["speedup"] is None
    assert second["beta"] is None
    assert report["speculative"]["speedup_per_prompt"]["median"] == pytest.approx(2)


def test_differences_name_the_first_token_that_differs() -> None:
    runs = [
        make_run(PLAIN, 0, [1, 2, 3], num_steps=1),
        make_run(4, 0, [1, 7, 8], num_steps=1),
        make_run(8, 0, [1, 2], num_steps=1),
        make_run(16, 0, [1, 2, 3], num_steps=1),
        make_run(4, 0, [1, 7, 9], num_steps=1),
    ]
    assert find_differences(runs) == [Difference(4, 0, 1, 2, 7), Difference(8, 0, 2, 3, None)]


@pytest.mark.parametrize(("gap", "tie"), [(0.0, True), (9e-5, True), (2e-4, False), (None, False)])
def test_a_tie_is_a_gap_within_the_tolerance(gap: float | None, tie: bool) -> None:
    assert is_tie(gap) is tie


def test_lossless_counts_ties_apart_from_mismatches() -> None:
    differences = [
        Difference(4, 0, 3, 1, 2, 1e-6),
        Difference(4, 1, 3, 1, 2, 0.5),
        Difference(4, 2, 3, 1, None),
    ]
    counts = lossless(10, differences)
    assert (counts["prompts"], counts["identical"]) == (10, 7)
    assert (counts["ties"], counts["mismatches"]) == (1, 2)
    assert counts["differences"][1] == {
        **{"setting": 4, "prompt": 1, "position": 3, "vanilla_token": 1, "speculative_token": 2},
        "logit_gap": 0.5,
    }


def test_a_difference_counts_for_its_own_setting_only(runs: list[Run]) -> None:
    difference = Difference(8, 0, 1, 2, 3, 0.5)
    report = build_report(runs, [difference], verify_ms={1: [1.0]}, context=CONTEXT)
    assert report["lossless"]["identical"] == 2
    assert report["speculative"]["by_num_nodes"]["8"]["lossless"]["mismatches"] == 1


def test_the_report_is_plain_json_with_its_context(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["machine"] == CONTEXT["machine"]
    assert report["verify_ms_by_tree_size"]["1"]["p50"] == pytest.approx(2)


def test_the_table_shows_the_main_numbers(report: dict[str, Any]) -> None:
    table = format_report(report)
    assert re.search(r"^plain +10\.000 +100\.0 +1\.000 +1\.000", table, re.MULTILINE)
    assert re.search(r"^4 nodes \* +5\.000 +200\.0 +2\.000 +2\.000", table, re.MULTILINE)
    assert "2 of 2 prompts identical, 0 ties, 0 mismatches" in table


def test_trace_nests_stages_in_steps_on_two_tracks(runs: list[Run]) -> None:
    trace = build_trace(runs, num_nodes=4)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    speculative = [event for event in spans if event["tid"] == SPECULATIVE_TRACK]
    assert [event["name"] for event in speculative[:8]] == [
        *("prompt 0", "prefill", "step"),
        *("draft", "search", "verify", "accept", "commit"),
    ]
    step, verify = speculative[2], speculative[5]
    assert (step["ts"], step["dur"]) == (3000, 10000)
    assert (verify["ts"], verify["dur"]) == (4500, 7000)
    assert {event["name"] for event in spans if event["tid"] == PLAIN_TRACK} == {
        *("prompt 0", "prompt 1", "prefill", "step")
    }
    json.dumps(trace, allow_nan=False)


def test_the_page_is_self_contained_and_escaped(report: dict[str, Any]) -> None:
    page = render(report)
    assert "demo &lt;20M&gt;" in page
    assert "A &amp; B" in page
    assert not re.search(r"src=|https?://|@import|<script", page)
    assert re.findall(r'href="([^"]*)"', page) == ["report.json", "trace.json"]
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        ElementTree.fromstring(chart)
    # The titles of the axes upwards are turned.
    assert len(re.findall(r'transform="translate\([^"]*\) rotate\(-90\)"', page)) == 3
    for stage in report["speculative"]["stages_ms"]:
        assert f"i.{stage} {{ background: var(--{stage}); }}" in page


def test_the_page_says_when_and_with_what_it_was_measured(runs: list[Run]) -> None:
    context = CONTEXT | {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "versions": VERSIONS,
    }
    page = render(build_report(runs, [], verify_ms={1: [1.0]}, context=context))
    assert (
        "measured 2026-01-02T03:04:05+00:00, project 0.1.0, onnxruntime 1.24.1, commit 0123456789ab;" in page
    )
    assert "2.00 times as fast as plain decoding with 4 draft nodes" in page


def test_slower_than_plain_decoding_is_said_in_words(runs: list[Run]) -> None:
    slow = [replace(run, end_ns=run.end_ns + 60 * MS) if run.setting != PLAIN else run for run in runs]
    report = build_report(slow, [], verify_ms={1: [1.0]}, context=CONTEXT)
    assert report["speculative"]["gamma"] == pytest.approx(10 / 35)
    for text in (render(report), format_report(report)):
        assert "Slower than plain decoding: even the fastest tree size measured, 4 draft nodes" in text


def test_a_legend_names_what_is_drawn_and_nothing_else(report: dict[str, Any]) -> None:
    page = render(report)
    charts = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    for style in re.findall(r'<i class="(?:rule )?(\w+)"></i>', page):
        assert re.search(rf'class="(part )?{style}"', charts), style
    assert '<i class="rule median"></i>median, 2.00x' in page


def test_the_page_without_any_acceptance(runs: list[Run]) -> None:
    idle = [replace(run, steps=tuple(replace(step, num_accepted=0) for step in run.steps)) for run in runs]
    report = build_report(idle, [], verify_ms={1: [1.0]}, context=CONTEXT)
    assert "No draft was accepted" in render(report)
    assert "\nnone " in format_report(report)


@pytest.mark.parametrize(
    ("high", "expected"),
    [(7.2, [0, 2, 4, 6, 8]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
def test_ticks_are_round_and_cover_the_range(high: float, expected: list[float]) -> None:
    assert report_html.ticks(high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (
            {1: [2.0], 9: [2.4]},
            "over 9 nodes takes 1.20 times as long as over one. It is bound by reading",
        ),
        ({1: [2.0], 9: [6.0]}, "takes 3.00 times as long as over one. It is bound by arithmetic"),
        ({}, "The target model's pass takes 70% of a step."),
    ],
)
def test_what_bounds_a_step_is_said(runs: list[Run], passes: dict[int, list[float]], expected: str) -> None:
    report = build_report(runs, [], verify_ms=passes, context=CONTEXT)
    (first, *others) = explanation(report)
    assert expected in first
    assert others == ["The fastest size is the smallest one measured; try smaller ones with --num-nodes."]


def test_a_slow_head_and_a_busy_host_are_named(report: dict[str, Any]) -> None:
    best = report["speculative"]
    best["stages_ms"]["draft"]["share"], best["host_share"] = 0.5, 0.4
    _, draft, host, _ = explanation(report)
    assert draft.startswith("The draft head takes 50% of a step")
    assert host.startswith("The host takes 40% of a step")

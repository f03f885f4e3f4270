"""Reliability of a draft's probabilities: the arithmetic, and the command on a tiny bundle."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.experiments import calibration
from benchmarks.experiments.calibration import Nodes, accepted_nodes, describe, followed, reliability
from runtime.core.calibration import calibrate
from runtime.core.token_tree import TokenTree
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.measure import host_step

A, B, C, D = range(10, 14)


def test_accepted_nodes_are_the_docstring_example() -> None:
    tree = TokenTree(
        np.array([9, A, B, C, B]), np.array([-1, 0, 1, 1, 0]), np.array([0, 1, 2, 2, 1]), np.zeros(5)
    )
    assert accepted_nodes(tree, np.array([A, B, D])).tolist() == [True, True, False, False]
    assert accepted_nodes(tree, np.array([A])).tolist() == [True, False, False, False]


def test_reliability_is_the_docstring_example() -> None:
    bins = reliability(np.array([0.2, 0.1]), np.array([True, False]))
    assert bins == [{"psi": 0.1, "accepted": 0.0, "count": 1}, {"psi": 0.2, "accepted": 1.0, "count": 1}]


def test_bins_have_equal_counts() -> None:
    bins = reliability(np.linspace(0, 1, 104), np.ones(104, np.bool_))
    assert [part["count"] for part in bins] == [11] * 4 + [10] * 6
    assert [part["psi"] for part in bins] == sorted(part["psi"] for part in bins)


def test_expected_and_measured_acceptance() -> None:
    psi = np.array([0.9, 0.5, 0.4, 0.2])
    nodes = Nodes(psi, np.array([True, False, True, False]), np.array([2, 2]), np.array([2]))
    assert nodes.measured_acceptance_length == 2.0
    found = describe(nodes, psi)
    assert found["expected_beta"] == pytest.approx(1 + 2.0 / 2)
    assert found["ece"] == pytest.approx((0.1 + 0.5 + 0.6 + 0.2) / 4)


def test_fit_lowers_the_error() -> None:
    rng = np.random.default_rng(0)
    psi = rng.beta(0.6, 2.0, 4000)
    nodes = Nodes(psi, rng.random(4000) < calibrate(psi, 0.5, -1.0), np.full(500, 8), np.array([200, 0, 300]))
    report = calibration.build_report(nodes, (3.0, 0.0), fit=True)
    assert report["fitted_here"]
    assert report["after"]["ece"] < report["before"]["ece"] / 3
    assert report["after"]["expected_beta"] == pytest.approx(report["measured_beta"], rel=1e-3)
    given = calibration.build_report(nodes, (0.5, 0.5), fit=False)
    assert given["calibration"] == [0.5, 0.5]
    # Badly fitted, and corrected by what each text accepts.
    gaps = [abs(given[key]["expected_beta"] - given["measured_beta"]) for key in ("after", "following")]
    assert gaps[1] < gaps[0] / 3
    bare = calibration.build_report(nodes, None, fit=False)
    assert bare["after"] is bare["following"] is None


def test_every_text_begins_with_the_fitted_calibration() -> None:
    psi = np.array([0.9, 0.5, 0.4, 0.9, 0.5, 0.4])
    accepted = np.array([True, True, True, False, False, False])
    nodes = Nodes(psi, accepted, np.array([2, 1, 2, 1]), np.array([2, 2]))
    found = followed(nodes, 0.7, -0.2)
    start = calibrate(psi, 0.7, -0.2)
    assert found[[0, 1, 3, 4]] == pytest.approx(start[[0, 1, 3, 4]])
    assert found[2] > start[2]
    assert found[5] < start[5]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "One?"}\n{"question": "And then?"}\n')
    return path


def test_command(
    tiny_bundle_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(out)]
    assert calibration.main([*argv, "--nodes", "6", "--max-new-tokens", "20", "--fit"]) == 0
    report = json.loads((out / "calibration.json").read_text())
    assert report["nodes"] == 6 * report["steps"]
    assert sum(part["count"] for part in report["before"]["bins"]) == report["nodes"]
    a, b = report["calibration"]
    assert f"a = {a:.4f}, b = {b:.4f} (fitted on these prompts)" in capsys.readouterr().out
    assert ElementTree.fromstring((out / "reliability.svg").read_text()).tag.endswith("svg")


def test_collected_acceptance_is_the_decoders_own(tiny_bundle_dir: Path) -> None:
    """1 + accepted nodes of every step but the last are the tokens that the steps emitted."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_nodes=8)
    propose = host_step(decoder).proposer.propose
    prompt = decoder.prompt_tokenizer.encode("Why?")
    nodes = calibration.collect(decoder, [prompt], 30)
    assert host_step(decoder).proposer.propose == propose
    emitted = [len(chunk.token_ids) for chunk in decoder.stream(prompt, max_new_tokens=30)][1:-1]
    ends = np.cumsum(nodes.sizes)
    accepted = [int(part.sum()) for part in np.split(nodes.accepted, ends[:-1])]
    assert [1 + count for count in accepted] == emitted


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--bundle", "absent", "is no engine bundle"),
        ("--prompts", "absent.jsonl", "cannot be read"),
        ("--nodes", "0", "--nodes: must be a whole number of at least 1, got '0'"),
        ("--search", "fancy", "--search: invalid choice"),
        ("--max-new-tokens", "9999", "prompts, prompt 1: "),
    ],
)
def test_bad_input_is_one_line(
    tiny_bundle_dir: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    message: str,
) -> None:
    flags = {"--bundle": tiny_bundle_dir, "--prompts": prompts, "--out": tmp_path / "out", flag: value}
    assert calibration.main([str(part) for pair in flags.items() for part in pair]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("calibration: ")
    assert message in line
    assert not (tmp_path / "out").exists()

"""A comparison's numbers from literal runs, its heads, and the order of its settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.methods.heads import (
    Head,
    count_parameters,
    default_heads,
    find_heads,
    natural_search,
    split_seed,
)
from benchmarks.methods.runs import Journal, Outcome, Record, Unit
from benchmarks.methods.table import (
    ROW_KEYS,
    Sample,
    aggregate,
    best_sizes,
    by_category,
    collect,
    detail,
    papers_count,
    ratios,
    row,
)
from runtime.core.errors import UserError
from runtime.profiler.report import acceptance_length

HEAD = Head(Path("ctc-seed1"), "ctc-seed1", "ctc", 1, "prefix", "ctc", 1000, {})


def make(
    method: str,
    new_tokens: int,
    decode_ms: float,
    accepted: list[int],
    difference: dict[str, Any] | None = None,
    draft_ms: float = 1.0,
) -> Outcome:
    nodes = 0 if method == "plain" else 8
    steps = len(accepted)
    return Outcome(
        method=method,
        nodes=nodes,
        prompt_tokens=5,
        new_tokens=new_tokens,
        decode_ms=decode_ms,
        draft_ms=[draft_ms] * steps,
        search_ms=[0.5] * steps,
        verify_ms=[2.0] * steps,
        accepted=accepted,
        difference=difference,
    )


@pytest.fixture
def sample() -> Sample:
    """7 tokens in 2 steps, of which the limit cuts one token off the second; 8 tokens in 4 steps."""
    return Sample(
        prompts=[0, 1],
        outcomes=[
            make("ctc-seed1", 7, 6.0, [2, 3], draft_ms=1.0),
            make("ctc-seed1", 8, 10.0, [0, 2, 0, 1], draft_ms=3.0),
        ],
        plain=[make("plain", 7, 12.0, [0] * 6), make("plain", 8, 14.0, [0] * 7)],
    )


def test_acceptance_length_is_the_docstring_example(sample: Sample) -> None:
    assert acceptance_length(sample.outcomes) == pytest.approx((6 + 7) / (2 + 4))
    assert acceptance_length(sample.plain) == 1


def test_papers_count_is_one_step_too_few(sample: Sample) -> None:
    assert papers_count(sample.outcomes) == pytest.approx((6 / 1 + 7 / 3) / 2)
    assert papers_count([make("ctc", 4, 1.0, [2])]) is None


def test_detail_and_row(sample: Sample) -> None:
    found = detail(HEAD, 8, "gsm8k", sample)
    # 26 ms for 13 tokens against 16 ms for 13 tokens.
    assert found["gamma"] == pytest.approx(26 / 16)
    assert found["draft_ms"] == 3.5  # of 1, 1, 3, 3, 3, 3, each with 0.5 for the search
    assert (found["num_steps"], found["num_tokens"], found["ties"], found["mismatches"]) == (6, 13, 0, 0)
    assert [entry["accepted"] for entry in found["acceptance_by_depth"]] == pytest.approx(
        [4 / 6, 3 / 6, 1 / 6], abs=1e-4
    )
    assert row(found) == {
        "method": "ctc-seed1",
        "prompts": "gsm8k",
        "nodes": 8,
        "beta": pytest.approx(13 / 6, abs=1e-4),
        "gamma": pytest.approx(26 / 16),
        "draft_ms": 3.5,
        "verify_ms": 2.0,
        "params": 1000,
        "lossless": "2/2",
    }
    assert tuple(row(found)) == ROW_KEYS


def test_ties_are_told_from_mismatches(sample: Sample) -> None:
    tie = {"position": 3, "plain_token": 5, "token": 6, "logit_gap": 5e-5}
    ended = {"position": 3, "plain_token": None, "token": 6, "logit_gap": None}
    outcomes = [make("ctc-seed1", 7, 6.0, [2, 3], tie), make("ctc-seed1", 8, 10.0, [0, 2, 0, 1], ended)]
    found = detail(HEAD, 8, "gsm8k", Sample(sample.prompts, outcomes, sample.plain))
    assert (found["lossless"], found["ties"], found["mismatches"]) == ("0/2", 1, 1)
    assert found["differences"] == [{"prompt": 0, **tie}, {"prompt": 1, **ended}]


def test_repeats_count_a_prompt_once(sample: Sample) -> None:
    twice = Sample(sample.prompts * 2, sample.outcomes * 2, sample.plain * 2)
    found, once = (detail(HEAD, 8, "gsm8k", part) for part in (twice, sample))
    assert found["lossless"] == "2/2"
    assert row(found) == row(once)


def test_seeds_are_averaged(sample: Sample) -> None:
    details = [detail(HEAD, 8, "gsm8k", sample)]
    details.append({**details[0], "method": "ctc-seed2", "beta": 3.0, "beta_paper": None, "lossless": "1/2"})
    details[1]["acceptance_by_depth"] = details[0]["acceptance_by_depth"][:1]
    (found,) = aggregate(details, {"ctc-seed1": "ctc", "ctc-seed2": "ctc"})
    assert (found["method"], found["heads"]) == ("ctc", ["ctc-seed1", "ctc-seed2"])
    low = details[0]["beta"]
    assert found["beta"] == pytest.approx({"mean": (low + 3) / 2, "min": low, "max": 3.0}, abs=1e-3)
    assert found["beta_paper"]["min"] == found["beta_paper"]["max"] == details[0]["beta_paper"]
    assert found["lossless"] == "3/4"
    assert found["acceptance_by_depth"] == pytest.approx([4 / 6, 3 / 12, 1 / 12], abs=1e-3)


def test_acceptance_length_by_category(sample: Sample) -> None:
    found = by_category({"ctc-seed1": sample}, {"ctc-seed1": "ctc"}, ["maths", "writing"])
    assert found == {"ctc": {"maths": 3.0, "writing": 1.75}}
    assert by_category({"ctc-seed1": sample}, {"ctc-seed1": "ctc"}, [None, None]) == {}


def test_outputs_of_one_token_cannot_be_timed() -> None:
    outcomes = [make("plain", 1, 0.0, []), make("ctc", 1, 0.0, [])]
    with pytest.raises(UserError, match="every output of gsm8k ends with its first token"):
        collect([Record(Unit("gsm8k", 0, 0), "", [9], outcomes)], "gsm8k")


def test_natural_search() -> None:
    assert natural_search("ctc", "ctc") == "paper"
    assert natural_search("ctc", "prefix") == "prefix"
    assert natural_search("ctc", None) == "prefix"
    assert natural_search("medusa", "ce") == "prefix"


def test_seed_suffix() -> None:
    assert split_seed("ctc-seed2") == ("ctc", 2)
    assert split_seed("ctc") == ("ctc", None)
    assert split_seed("seed-1") == ("seed-1", None)


def test_heads_are_described(tiny_drafter_dir: Path, tiny_model_dir: Path) -> None:
    from safetensors.numpy import load_file

    head, other = find_heads([str(tiny_drafter_dir), f"{tiny_drafter_dir}:paper"], tiny_model_dir)
    assert (head.label, head.search, head.seed) == ("drafter", "prefix", None)
    assert (other.label, other.method, other.search) == ("drafter:paper", "drafter:paper", "paper")
    weights = load_file(tiny_drafter_dir / "model.safetensors")
    assert head.params == sum(tensor.size for tensor in weights.values())
    assert set(head.digests) == {"config.json", "model.safetensors"}


def test_the_default_heads_are_those_of_the_model(tiny_model_dir: Path) -> None:
    """The demo also has a head of another model, that of ``make chat``."""
    demo = Path(__file__).resolve().parents[3] / "demo"
    heads = find_heads(default_heads(demo / "heads", demo / "backbone"), demo / "backbone")
    assert {"ctc", "medusa", "streams"} <= {head.label for head in heads}
    with pytest.raises(UserError, match="there is no draft head for"):
        default_heads(demo / "heads", tiny_model_dir)


def test_the_papers_loss_gets_the_papers_search(
    tmp_path: Path, tiny_drafter_dir: Path, tiny_model_dir: Path
) -> None:
    for key, name in (("head", "a"), ("settings", "b")):
        directory = tmp_path / name
        directory.mkdir()
        for file in tiny_drafter_dir.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "training.json").write_text(json.dumps({key: {"loss": "ctc"}}))
        (head,) = find_heads([str(directory)], tiny_model_dir)
        assert (head.label, head.search) == (name, "paper")
        (head,) = find_heads([f"{directory}:prefix"], tiny_model_dir)
        assert head.label == f"{name}:prefix"


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0[1,2]", b'\x08\0\0\0\0\0\0\0{"a": 1}']
)
def test_damaged_weights_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no safetensors file"):
        count_parameters(path)


@pytest.mark.parametrize("line", ["{}", "not JSON", '{"format": 1, "settings": {}}'])
def test_foreign_runs_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"format": 1, "settings": {"nodes": [8]}}\n' + line + "\n")
    with pytest.raises(UserError, match=r"runs\.jsonl:2: expected a record of an earlier run"):
        Journal(path, {"nodes": [8]})


def test_journal_keeps_records(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    journal = Journal(path, {"nodes": (8,)})
    assert not path.parent.exists()
    records = [Record(Unit("gsm8k", 0, n), "abc", [1, 2], [make("plain", 2, 1.0, [0])]) for n in (0, 1)]
    for record in records:
        journal.append(record)
    again = Journal(path, {"nodes": (8,)})
    assert again.select([record.unit for record in records]) == records
    assert again.has(Unit("gsm8k", 0, 0), "abc")
    assert not again.has(Unit("gsm8k", 1, 0), "abc")


def aggregated(
    method: str, prompts: str, nodes: int, beta: tuple[float, float], gamma: float
) -> dict[str, Any]:
    low, high = beta
    return {
        "method": method,
        "prompts": prompts,
        "nodes": nodes,
        "beta": {"mean": (low + high) / 2, "min": low, "max": high},
        "gamma": {"mean": gamma, "min": gamma, "max": gamma},
    }


def test_ratios_are_means_over_the_files_and_bounds_are_unkind() -> None:
    rows = [
        aggregated("ours", "a", 8, (3.0, 5.0), 1.5),
        aggregated("ours", "b", 8, (6.0, 6.0), 1.9),
        aggregated("ours", "a", 16, (6.0, 6.0), 1.4),
        aggregated("ours", "b", 16, (6.0, 6.0), 2.0),
        aggregated("theirs", "a", 8, (2.0, 2.0), 1.0),
        aggregated("theirs", "b", 8, (2.0, 4.0), 1.0),
        aggregated("theirs", "a", 16, (2.0, 2.0), 1.1),
        aggregated("theirs", "b", 16, (6.0, 6.0), 0.9),
    ]
    [found] = ratios(rows, "ours")
    assert (found["method"], found["other"]) == ("ours", "theirs")
    # 4 / 2 and 6 / 3; at worst 3 / 2 and 6 / 4; at best 5 / 2 and 6 / 2.
    assert found["by_nodes"] == [
        {"nodes": 8, "mean": 2.0, "min": 1.5, "max": 2.75},
        {"nodes": 16, "mean": 2.0, "min": 2.0, "max": 2.0},
    ]
    assert found["mean"] == 2.0
    assert ratios(rows[:4], "ours") == []
    chosen = [(row["method"], row["prompts"], row["nodes"]) for row in best_sizes(rows)]
    assert chosen == [("ours", "a", 8), ("ours", "b", 16), ("theirs", "a", 16), ("theirs", "b", 8)]

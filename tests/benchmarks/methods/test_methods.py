"""The comparison of draft heads: from a command line over tiny heads to its files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.methods import __main__ as methods
from benchmarks.methods import compare
from benchmarks.methods.compare import Comparison
from benchmarks.methods.heads import SOURCES_NAME, ensure_bundle, find_heads, model_digests
from export.options import OWN_PASS, Options
from runtime.core.bundle import MANIFEST_NAME, Bundle
from runtime.decode.acceptance import Acceptance, GreedyAcceptor

ROW = {"method", "prompts", "nodes", "beta", "gamma", "draft_ms", "verify_ms", "params", "lossless"}
FIXED = ("method", "prompts", "nodes", "beta", "params", "lossless")


@dataclass
class Workplace:
    """Two seeds of a tiny head and two prompt files; bundles are copies of one, not built."""

    root: Path
    model: Path
    built: list[str] = field(default_factory=list)
    # Of a head's name: the bundle that is copied, where it is not that of the tiny heads.
    bundles: dict[str, Path] = field(default_factory=dict)

    def head(self, name: str) -> Path:
        return self.root / "heads" / name

    def argv(self, out: str = "out", **changed: Any) -> list[str]:
        flags = {
            "model": self.model,
            "heads": [self.head("tiny-seed1"), self.head("tiny-seed2"), f"{self.head('tiny-seed1')}:paper"],
            "prompts": [self.root / "asked.jsonl", self.root / "raw.jsonl"],
            "nodes": "2,5",
            "max-new-tokens": 12,
            "bundles": self.root / "bundles",
            "out": self.root / out,
            **{name.replace("_", "-"): value for name, value in changed.items()},
        }
        argv = []
        for name, value in flags.items():
            argv += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return argv

    def report(self, out: str = "out") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / out / "methods.json").read_text())
        return found

    def lines(self, out: str = "out") -> list[str]:
        return (self.root / out / "runs.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def stream_bundles(
    stream_bundle_of: Callable[[str], Path], own_pass_bundle_of: Callable[[str], Path]
) -> dict[str, Path]:
    """Made before the builder is replaced. Those with a pass of their own have ``:own`` in their names."""
    names = ("streaming", "ctc")
    return {
        **{name: stream_bundle_of(name) for name in names},
        **{f"{name}:own": own_pass_bundle_of(name) for name in names},
    }


@pytest.fixture
def workplace(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Workplace:
    place = Workplace(tmp_path, tiny_model_dir)
    for name in ("tiny-seed1", "tiny-seed2"):
        shutil.copytree(tiny_drafter_dir, place.head(name))
    origin = {"settings": {"model": "tiny"}, "head": {"loss": "prefix"}}
    (place.head("tiny-seed1") / "training.json").write_text(json.dumps(origin))
    rows = [{"turns": ["One?", "Two?"], "category": "maths"}, {"question": "Why?", "category": "talk"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "raw.jsonl").write_text('{"text": "to be continued"}\n')

    def build(model_dir: Path, out: Path, *, drafter_dir: Path, options: Options) -> Bundle:
        place.built.append(drafter_dir.name)
        shutil.rmtree(out, ignore_errors=True)
        suffix = ":own" if options.stream_pass == OWN_PASS else ""
        shutil.copytree(place.bundles.get(drafter_dir.name + suffix, tiny_bundle_dir), out)
        return Bundle.load(out)

    monkeypatch.setattr("export.build_engines.build", build)
    return place


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("nothing should be decoded or built")


def stop_after(count: int) -> Callable[..., Any]:
    """``Comparison.measure`` that is interrupted after so many prompts."""
    calls: list[int] = []
    measure = Comparison.measure

    def interrupted(self: Comparison, *args: Any) -> Any:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(1)
        return measure(self, *args)

    return interrupted


def test_files_and_rows(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    assert methods.main(workplace.argv()) == 0
    report = workplace.report()
    rows = report["rows"]
    assert all(set(row) == ROW for row in rows)
    labels = ["tiny-seed1", "tiny-seed2", "tiny-seed1:paper"]
    assert [(row["prompts"], row["method"], row["nodes"]) for row in rows] == [
        (prompts, label, nodes) for prompts in ("asked", "raw") for label in labels for nodes in (2, 5)
    ]
    assert {row["lossless"] for row in rows} == {"2/2", "1/1"}
    assert all(1 <= row["beta"] <= 5 for row in rows)
    assert all(row[key] > 0 for row in rows for key in ("gamma", "draft_ms", "verify_ms"))
    # A seed is a head of the method; another search is another method.
    methods_found = {(row["method"], tuple(row["heads"])) for row in report["methods"]}
    assert methods_found == {("tiny", ("tiny-seed1", "tiny-seed2")), ("tiny:paper", ("tiny-seed1:paper",))}
    assert set(report["categories"]) == {"asked"}
    assert set(report["categories"]["asked"]["tiny"]) == {"maths", "talk"}
    assert workplace.built == ["tiny-seed1", "tiny-seed2"]

    text = (workplace.root / "out" / "methods.md").read_text()
    table = capsys.readouterr().out.split("\n\n")[0]
    assert table in text
    assert table.count("\n") == 1 + 2 * (1 + 2 * 2)
    for heading in (
        "## The best tree size",
        "## Acceptance length of tiny over the others'",
        "## Acceptance length by category: asked, 5 nodes",
        "## Accepted at depth",
    ):
        assert heading in text
    for name in ("beta_nodes.svg", "beta_draft.svg"):
        svg = (workplace.root / "out" / name).read_text()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "nan" not in svg.lower()


def test_finished_run_is_not_measured_again(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert methods.main(workplace.argv(prompts=[workplace.root / "asked.jsonl"])) == 0
    rows = workplace.report()["rows"]
    (workplace.root / "out" / "methods.json").unlink()
    monkeypatch.setattr(compare, "Comparison", refuse)
    monkeypatch.setattr(compare, "ensure_bundle", refuse)
    assert methods.main(workplace.argv(prompts=[workplace.root / "asked.jsonl"])) == 0
    assert workplace.report()["rows"] == rows
    # Fewer prompts are a part of what is there.
    assert methods.main(workplace.argv(prompts=[workplace.root / "asked.jsonl"], max_prompts=1)) == 0
    assert {row["lossless"] for row in workplace.report()["rows"]} == {"1/1"}


def test_interrupted_run_continues(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert methods.main(workplace.argv("whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Comparison, "measure", stop_after(1))
        capsys.readouterr()
        assert methods.main(workplace.argv()) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "methods: interrupted; the same command continues"
    assert len(workplace.lines()) == 2
    assert not (workplace.root / "out" / "methods.json").exists()

    # A line that was being written when the process died is run again.
    with (workplace.root / "out" / "runs.jsonl").open("a") as stream:
        stream.write('{"unit": {"prompts": "asked"')
    first = workplace.lines()[:2]
    assert methods.main(workplace.argv()) == 0
    assert workplace.lines()[:2] == first
    assert len(workplace.lines()) == 4
    whole, resumed = (
        [{key: row[key] for key in FIXED} for row in workplace.report(out)["rows"]]
        for out in ("whole", "out")
    )
    assert resumed == whole


def test_wrong_output_is_reported(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accept = GreedyAcceptor.accept

    def wrong(self: GreedyAcceptor, tree: Any, next_tokens: Any, logits: Any) -> Acceptance:
        right = accept(self, tree, next_tokens, logits)
        return right if len(tree) == 1 else Acceptance(right.path, (right.bonus + 1) % 256)

    monkeypatch.setattr(GreedyAcceptor, "accept", wrong)
    argv = workplace.argv(
        prompts=[workplace.root / "raw.jsonl"], heads=[workplace.head("tiny-seed1")], nodes=3
    )
    assert methods.main(argv) == 1
    captured = capsys.readouterr()
    assert "NOT LOSSLESS: tiny-seed1, 3 nodes, raw: 1 outputs differ" in captured.err
    assert "0/1, **1 wrong**" in captured.out
    report = workplace.report()
    assert report["rows"][0]["lossless"] == "0/1"
    assert report["details"][0]["mismatches"] == 1
    assert report["details"][0]["differences"][0]["logit_gap"] > 1e-4


def test_streams_and_a_fine_tuned_model(workplace: Workplace, stream_bundles: dict[str, Path]) -> None:
    """A head that fine-tunes the target model is compared with plain decoding of that model."""
    workplace.bundles |= stream_bundles
    for name in ("ctc", "streaming"):
        shutil.copytree(stream_bundles[name].parent / "head", workplace.head(name))
    labels = ["ctc", "tiny-seed1", "streaming", "streaming:own", "ctc:own"]
    heads = [workplace.head(label) for label in labels]
    prompts = workplace.root / "asked.jsonl"
    assert methods.main(workplace.argv(heads=heads, prompts=[prompts], nodes=5)) == 0
    rows = workplace.report()["rows"]
    assert [(row["method"], row["lossless"]) for row in rows] == [(label, "2/2") for label in labels]
    record = json.loads(workplace.lines()[1])
    assert [outcome["method"] for outcome in record["outcomes"]] == [
        "plain",
        "plain of ctc",
        "ctc",
        "tiny-seed1",
        "streaming",
        "streaming:own",
        # The graph of the fine-tuned model is that of the other; its weights are not.
        "plain of ctc:own",
        "ctc:own",
    ]
    texts = {outcome["method"]: outcome["new_tokens"] for outcome in record["outcomes"]}
    assert texts["ctc"] == texts["plain of ctc"] == texts["ctc:own"]
    # The plain decoding in the table is that of the model as it is.
    assert workplace.report()["plain"][0]["num_prompts"] == 2


def test_other_settings_are_refused(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [workplace.root / "raw.jsonl"]
    heads = [workplace.head("tiny-seed1")]
    assert methods.main(workplace.argv(prompts=prompts, heads=heads)) == 0
    before = workplace.lines()
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"nodes": "2,6"}, "nodes"),
        ({"max_new_tokens": 13}, "max_new_tokens"),
        ({"heads": [workplace.head("tiny-seed2")]}, "heads"),
    )
    for changed, name in changes:
        capsys.readouterr()
        assert methods.main(workplace.argv(**{"prompts": prompts, "heads": heads, **changed})) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"written with other settings ({name}: " in line
    (workplace.root / "raw.jsonl").write_text('{"text": "another"}\n')
    assert methods.main(workplace.argv(prompts=prompts, heads=heads)) == 2
    assert "prompt 1 of raw is not the one in" in capsys.readouterr().err
    assert workplace.lines() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": ["{root}/heads/absent"]}, "no drafter checkpoint"),
        ({"heads": ["{root}/heads/other"]}, "base_num_layers must be the model's 2, got 3"),
        ({"heads": ["{root}/heads/tiny-seed1:fancy"]}, "what follows a directory must be own or one of"),
        (
            {"heads": ["{root}/heads/tiny-seed1", "{root}/heads/tiny-seed1:prefix"]},
            "tiny-seed1 is given twice",
        ),
        ({"heads": ["{root}/heads/tiny-seed1:own"]}, "own is for streams, got a ctc head"),
        ({"heads": ["{root}/heads/broken"]}, "model.safetensors is no safetensors file"),
        ({"model": "{root}/absent"}, "--model"),
        ({"prompts": ["{root}/absent.jsonl"]}, "cannot be read"),
        ({"prompts": ["{root}/asked.jsonl", "{root}/heads/asked.jsonl"]}, "two files are named asked"),
        ({"prompts": ["{root}/long.jsonl"]}, "long, prompt 2: "),
        ({"nodes": "0"}, "--nodes: must be a whole number of at least 1, got '0'"),
        ({"nodes": "8,300"}, "--nodes: must be at most 256 nodes, got 300"),
        ({"repeats": "none"}, "--repeats: must be a whole number"),
        ({"out": "{root}/asked.jsonl"}, "is a file; expected a directory"),
    ],
)
def test_bad_input_is_one_line(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str
) -> None:
    for name in ("other", "broken"):
        shutil.copytree(workplace.head("tiny-seed1"), workplace.head(name))
    config = json.loads((workplace.head("other") / "config.json").read_text())
    (workplace.head("other") / "config.json").write_text(json.dumps({**config, "base_num_layers": 3}))
    (workplace.head("broken") / "model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0not JSON")
    shutil.copy(workplace.root / "asked.jsonl", workplace.root / "heads")
    rows = [{"text": "short"}, {"text": "x" * 600}]
    (workplace.root / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def here(value: Any) -> Any:
        root = str(workplace.root)
        return [here(v) for v in value] if isinstance(value, list) else value.replace("{root}", root)

    argv = workplace.argv(**{name: here(value) for name, value in changed.items()})
    assert methods.main(argv) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("methods: ")
    assert message in line
    assert captured.out == ""
    assert not (workplace.root / "out").exists()


def test_bundle_is_built_again_only_for_other_files(workplace: Workplace) -> None:
    def ensure(options: Options | None = None) -> Path:
        (head,) = find_heads([str(workplace.head("tiny-seed1"))], workplace.model)
        return ensure_bundle(
            head,
            workplace.model,
            model_digests(workplace.model),
            workplace.root / "bundles",
            options or Options(),
        )

    path = ensure()
    ensure()
    assert len(workplace.built) == 1
    with (workplace.head("tiny-seed1") / "config.json").open("a") as stream:
        stream.write("\n")
    ensure()
    assert len(workplace.built) == 2
    # Neither a bundle that someone else put there nor one that was changed is trusted.
    for damage in (
        lambda: (path / SOURCES_NAME).unlink(),
        lambda: (path / MANIFEST_NAME).write_text((path / MANIFEST_NAME).read_text()[1:]),
        lambda: (path / "drafter.onnx").write_bytes((path / "drafter.onnx").read_bytes()[::-1]),
        lambda: (path / "backbone.onnx").unlink(),
    ):
        before = len(workplace.built)
        damage()
        ensure()
        ensure()
        assert len(workplace.built) == before + 1
    ensure(Options(min_level_probability=0.5))
    assert len(workplace.built) == before + 2

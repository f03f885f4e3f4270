"""The sweep of speculative streams: its points, what they cost, its files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import streams
from benchmarks.streams import Point, make_points, measured_row, shorten
from drafters.build import load_drafter
from drafters.config import DrafterConfig
from drafters.streaming import StreamFrames
from export.options import OWN_PASS, Options
from runtime.core.bundle import Bundle
from runtime.core.errors import UserError
from tests.stream_heads import load_model

PROMPTS = ["One?", "Two and two?"]


@pytest.fixture(scope="module")
def shared_head(stream_bundle_of: Callable[[str], Path]) -> Path:
    return stream_bundle_of("ctc").parent / "head"


@pytest.fixture
def workplace(
    tmp_path: Path,
    tiny_model_dir: Path,
    stream_bundle_of: Callable[[str], Path],
    own_pass_bundle_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[str]]:
    """A command line over a head of streams; its bundles are copies, not built."""
    bundle, of_own_pass = stream_bundle_of("streaming"), own_pass_bundle_of("streaming")
    shutil.copytree(bundle.parent / "head", tmp_path / "streams")
    rows = "".join(json.dumps({"question": text}) + "\n" for text in PROMPTS)
    (tmp_path / "asked.jsonl").write_text(rows)

    def build(model_dir: Path, out: Path, *, options: Options, **_: Any) -> Bundle:
        shutil.copytree(of_own_pass if options.stream_pass == OWN_PASS else bundle, out)
        return Bundle.load(out)

    monkeypatch.setattr("export.build_engines.build", build)

    def argv(**changed: Any) -> list[str]:
        flags = {
            "model": tiny_model_dir,
            "heads": tmp_path / "streams",
            "prompts": tmp_path / "asked.jsonl",
            "nodes": 5,
            "gammas": "2,4",
            "kept": "1,3",
            "max-new-tokens": 12,
            "out": tmp_path / "out",
            **changed,
        }
        return [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    return argv


def test_layer_evaluations() -> None:
    point = Point("layers", "head", 6, 2, 4, kept_nodes=3)
    # 9 nodes in the 4 lower layers; the root and 3 drafts with 4 streams each in the upper 2.
    assert point.layer_evaluations(9) == 9 * 4 + 4 * 2 * 5
    assert point.layer_evaluations(2) == 2 * 4 + 2 * 2 * 5
    point = Point("layers", "head", 6, 2, 4, None)
    assert (point.layer_evaluations(9), point.repeated_evaluations) == (9 * 4 + 9 * 2 * 5, 0)
    own = Point("layers", "head", 6, 2, 4, None, "own")
    assert (own.layer_evaluations(9), own.repeated_evaluations) == (9 * 6 + 2 * 4, 2)


def test_outputs_of_one_token_have_no_steps() -> None:
    with pytest.raises(UserError, match=r"^questions: every output ends with its first token"):
        measured_row("questions", Point("layers", "head", 6, 2, 4, None), [], [])


def test_a_sweep(
    workplace: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert streams.main(workplace()) == 0
    report = json.loads((tmp_path / "out" / "streams.json").read_text())
    rows = report["rows"]
    found = [(row["sweep"], row["stream_pass"], row["num_frames"], row["kept_nodes"]) for row in rows]
    assert found == [
        ("layers", "verify", 4, None),
        ("streams", "verify", 2, None),
        ("streams", "verify", 4, None),
        ("layers", "own", 4, None),
        ("streams", "own", 2, None),
        ("streams", "own", 4, None),
        ("pruning", "verify", 4, None),
        ("pruning", "verify", 4, 3),
        ("pruning", "verify", 4, 1),
    ]
    # The same drafts, for fewer rows.
    assert rows[0]["beta"] == rows[3]["beta"]
    assert rows[3]["evaluations"] < rows[0]["evaluations"]
    assert {(row["num_prompts"], row["ties"], row["mismatches"]) for row in rows} == {(2, 0, 0)}
    assert all(row["speedup"] > 0 for row in rows)
    everything, three, one = rows[6:]
    assert everything["beta"] >= three["beta"] >= one["beta"] >= 1
    # Rows a step: evaluations a token times tokens a step.
    costs = [row["evaluations"] * row["beta"] for row in (everything, three, one)]
    assert costs == sorted(costs, reverse=True)
    text = (tmp_path / "out" / "streams.md").read_text()
    printed = capsys.readouterr().out
    for title in ("Upper layers that the streams pass", "Streams of a node", "Pruning at layer"):
        assert title in text
        assert title in printed
    svg = (tmp_path / "out" / "streams.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")


@torch.no_grad()
def test_a_shortened_head_has_the_first_streams(
    tmp_path: Path, tiny_model_dir: Path, stream_bundle_of: Callable[[str], Path]
) -> None:
    model = load_model(tiny_model_dir)
    directory = stream_bundle_of("streaming").parent / "head"
    whole, short = (
        load_drafter(path).attach_model(model)
        for path in (directory, shorten(directory, 2, tmp_path / "short"))
    )
    assert isinstance(whole, StreamFrames)
    assert isinstance(short, StreamFrames)
    features = torch.randn(1, 5, 64)
    positions = torch.arange(9).unsqueeze(0)
    frames = [
        head(
            features,
            positions[:, :5],
            None,
            positions[:, 5 : 5 + count],
            torch.ones(1, 1, count, 5 + count, dtype=torch.bool),
        )
        for head, count in ((whole, 4), (short, 2))
    ]
    torch.testing.assert_close(frames[0][:, :2], frames[1], atol=1e-5, rtol=1e-5)


def test_bad_input_is_one_line(
    shared_head: Path,
    workplace: Callable[..., list[str]],
    tmp_path: Path,
    tiny_drafter_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for changed, message in (
        ({"gammas": "2,5"}, "--gammas: streams has 4 streams, got 5"),
        ({"heads": tiny_drafter_dir}, "is a ctc head; expected one with streams"),
        ({"heads": f"{tmp_path / 'streams'}:own"}, "names a pass, and both are measured"),
        ({"heads": shared_head}, "fine-tunes the target model; benchmarks.methods compares such heads"),
        ({"heads": tmp_path / "absent"}, "no drafter checkpoint"),
    ):
        assert streams.main(workplace(**changed)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("streams: ")
        assert message in line
    assert not (tmp_path / "out").exists()


def test_points_of_several_heads() -> None:
    config = DrafterConfig.load(Path("demo/heads/ctc"))
    points = make_points({"a": config, "b": config}, [1], [2, 4])
    of_one_pass = [("a", "layers", None), ("b", "layers", None), ("b", "streams", None)]
    assert [(point.head, point.sweep, point.kept_nodes) for point in points] == [
        *of_one_pass,
        *of_one_pass,
        ("b", "pruning", None),
        ("b", "pruning", 4),
        ("b", "pruning", 2),
    ]

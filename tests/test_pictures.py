"""The pictures of the README: the command draws any bundle's run, and what it draws is what was decoded."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from demo import pictures
from demo.pictures import _rows, _wrapped
from runtime.decoder import SpeculativeDecoder
from tests.document_commands import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path, colour: str) -> str:
    """What a picture shows in one colour, without the words that explain it."""
    found = ElementTree.parse(path).iter(f"{SVG}text")
    lines = [text for text in found if text.get("class") == "mono"]
    return "".join(
        span.text or "" for line in lines for span in line.iter(f"{SVG}tspan") if span.get("class") == colour
    )


def test_the_command_draws_what_was_decoded(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "pictures"
    argv = ["--bundle", str(tiny_bundle_dir), "--prompt", "How many?", "--out", str(out)]
    assert pictures.main(argv) == 0
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_nodes=8)
    chunks = list(decoder.stream(decoder.prompt_tokenizer.encode("How many?"), max_new_tokens=128))
    drafted = "".join(piece.text for chunk in chunks for piece in chunk.pieces if piece.drafted)
    # Control characters, which a random model writes too, cannot be drawn.
    drafted = "".join(each if each.isprintable() else "\ufffd" for each in drafted if each != "\n")
    assert texts(out / "completion.svg", "drafted") == drafted
    boxes = ElementTree.parse(out / "step.svg").iter(f"{SVG}rect")
    kinds = [box.get("class") for box in boxes]
    assert kinds.count("root") == kinds.count("bonus") == 1
    assert kinds.count("accepted") + kinds.count("node") <= 8


def test_the_drawn_path_is_accepted(tiny_bundle_dir: Path) -> None:
    recording = pictures.record(tiny_bundle_dir, "How many?", 8)
    accepted = [token for chunk in recording.chunks[1:-1] for token in chunk.token_ids]
    drawn = [
        int(token)
        for step in recording.steps
        for token in (*step.tree.tokens[step.path[1:]], np.int64(step.bonus_token))
    ]
    assert drawn == accepted


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bundle", "absent"], "pictures: absent is no engine bundle: bundle.json is missing"),
        (["--step", "10000"], "pictures: --step: must be at most"),
    ],
)
def test_wrong_input_is_one_line(
    argv: list[str],
    message: str,
    tiny_bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pictures.main(["--bundle", str(tiny_bundle_dir), "--out", str(tmp_path), *argv]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_tree() -> None:
    # 0 - 1 - 2 (accepted) - 5, 1 - 3, 0 - 4
    assert _rows([-1, 0, 1, 1, 0, 2], {0, 1, 2, 5}) == [0, 0, 0, 1, 2, 0]


def test_lines_end_between_words() -> None:
    lines = _wrapped([("one two ", "a"), ("three\nfour", "b")], 9)
    assert lines == [[("one two ", "a")], [("three", "b")], [("four", "b")]]
    assert _wrapped([("abcdef", "a")], 4) == [[("abcd", "a")], [("ef", "a")]]


@pytest.mark.parametrize("name", ["step", "completion"])
def test_the_shipped_pictures_need_nothing_else(name: str) -> None:
    """They load no fonts and no pictures, and have colours for dark pages."""
    text = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(r"@font-face|href=|url\(|<script", text)
    assert "prefers-color-scheme:dark" in text
    assert len(text) < 30_000

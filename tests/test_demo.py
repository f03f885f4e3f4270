"""The shipped heads load in this release and fit the shipped model."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from demo import corpus
from drafters.build import load_drafter

DEMO = Path(__file__).resolve().parents[1] / "demo"
HEADS = sorted(path.parent for path in (DEMO / "heads").glob("*/config.json"))


def test_there_is_a_head() -> None:
    assert DEMO / "heads" / "ctc" in HEADS


@pytest.mark.parametrize("directory", HEADS, ids=lambda directory: directory.name)
def test_a_shipped_head_fits_the_shipped_model(directory: Path) -> None:
    config = load_drafter(directory).config
    sizes = (config.vocab_size, config.hidden_size, config.base_num_layers)
    if directory.name == "smollm2":  # of the model that ``make chat`` fetches
        assert (*sizes, config.base_model) == (49152, 576, 30, "SmolLM2-135M-Instruct")
    else:
        base = AutoConfig.from_pretrained(DEMO / "backbone")
        assert sizes == (base.vocab_size, base.hidden_size, base.num_hidden_layers)
        assert config.base_model == "backbone"
    # The record names no path of the machine on which the head was trained.
    record = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    assert record["num_sequences"] > 0
    assert "/" not in json.dumps([record["settings"]["model"], record["settings"]["data"]])


def test_the_corpus_makes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As demo/README.md has it: in a fresh clone there is no build/."""
    monkeypatch.setattr(corpus, "python_tasks", lambda: [("request", "solution")])
    out = tmp_path / "build" / "python_tasks.jsonl"
    assert corpus.main(["--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"prompt": "request", "completion": "solution"}

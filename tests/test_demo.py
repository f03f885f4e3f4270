"""The shipped heads load in this release and fit the shipped model."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from demo import corpus, pretrain
from drafters.build import load_drafter
from runtime.core.errors import UserError

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


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5001, "{"])
def test_a_line_that_json_cannot_read_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(f'{{"question": "What?", "answer": "5"}}\n{line}\n')
    with pytest.raises(UserError, match=r"gsm8k\.jsonl:2: expected an object with 'question' and 'answer'"):
        corpus.gsm8k_documents(path)


def test_pretraining_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model of one narrow layer, few documents, and a clock that counts a minute a step."""
    monkeypatch.setattr(pretrain, "python_documents", lambda: [f"def f{n}(): ..." for n in range(200)])
    monkeypatch.setattr(pretrain, "VOCAB_SIZE", 300)
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=0, pad_token_id=0)
    monkeypatch.setattr(pretrain, "build_model", lambda: LlamaForCausalLM(config))
    clock = itertools.count(0, 60)
    monkeypatch.setattr(pretrain.time, "perf_counter", lambda: next(clock))
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(200)]
    gsm8k = tmp_path / "gsm8k.jsonl"
    gsm8k.write_text("\n".join(rows) + "\n")
    command = ["--gsm8k", str(gsm8k), "--out", str(tmp_path / "out"), "--batch-size", "3", "--window", "8"]
    with monkeypatch.context() as gpu:  # the checkpoint says that it was written on a GPU
        gpu.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        assert pretrain.main([*command, "--minutes", "3"]) == 0
    assert pretrain.main([*command, "--minutes", "5"]) == 0
    curve = json.loads((tmp_path / "out" / "training.json").read_text())["curve"]
    assert [(row["step"], row["minutes"]) for row in curve] == [(3, 3.0), (5, 5.0)]
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 32
    capsys.readouterr()

    gsm8k.write_text("\n".join([*rows, "[]"]))
    assert pretrain.main(command) == 2
    assert capsys.readouterr().err == (
        f"pretrain: --gsm8k: {gsm8k}:201: expected an object with 'question' and 'answer', got '[]'\n"
    )

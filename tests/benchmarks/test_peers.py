"""Engines side by side: the command on a tiny model, the protocol of its processes, GGUF files."""

import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import worker as worker_module
from benchmarks.peers.__main__ import Contender, Run, quartiles, rows, same_beginning
from benchmarks.peers.engines import ENGINES, OURS_PLAIN, OURS_SPECULATIVE, Decode, Engine, Opening, Receive
from benchmarks.peers.gguf_file import UnsupportedModelError, check, write_gguf
from benchmarks.peers.models import Models, hugging_face_directory
from benchmarks.peers.report import figure, markdown
from benchmarks.peers.worker import Worker, WorkerError
from export.options import BLOCKS

ROW = {"engine", "precision", "method", "ms_per_token", "tokens", "same_tokens", "resident_mb"}
OPENING = Opening(
    engine=OURS_PLAIN,
    precision="fp32",
    method="plain",
    path="nowhere",
    threads=1,
    context=64,
    lookup_tokens=4,
    num_nodes=8,
)
# A worker that knows the protocol and no engine.
FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "convert" in request:
        print("{}", flush=True)
    elif "open" in request:
        print(json.dumps({"version": request["open"]["engine"], "resident_mb": 1.0}), flush=True)
    elif request["decode"]["prompt_ids"] == [0]:
        print(json.dumps({"error": "ValueError: no zeros"}), flush=True)
    elif request["decode"]["prompt_ids"] == [1]:
        sys.exit(3)
    else:
        print(json.dumps({"token_ids": request["decode"]["prompt_ids"]}), flush=True)
"""


@pytest.fixture
def opened(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "logs" / "log", [sys.executable, "-c", FAKE])


@pytest.mark.slow
def test_command_with_ours_and_transformers(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bundles are copies: building them takes a minute."""

    def converted(models: Models, engine: Engine, method: str, precision: str) -> Path:
        out = tmp_path / "converted" / engine.name
        if not out.exists():
            out.mkdir(parents=True)
            name, source = ("bundle", tiny_bundle_dir) if engine.is_ours else ("model", tiny_model_dir)
            (out / name).symlink_to(source)
        return out

    monkeypatch.setattr(Models, "ensure", converted)
    # So that the engine is missing where it is installed, too.
    monkeypatch.setitem(
        ENGINES, "ctranslate2", dataclasses.replace(ENGINES["ctranslate2"], imports=("no_such_module",))
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n{"prompt": "Why not?"}\n{"prompt": "unread"}\n')
    argv = ["--model", str(tiny_model_dir), "--drafter", str(tiny_drafter_dir), "--prompts", str(prompts)]
    argv += ["--num-prompts", "2", "--max-new-tokens", "9", "--precisions", "fp32", "--threads", "1"]
    argv += ["--engines", "ours-speculative,ctranslate2,transformers", "--out", str(tmp_path / "out")]
    assert peers.main(argv) == 0
    report = json.loads((tmp_path / "out/peers.json").read_text())
    found = report["rows"]
    assert [(row["engine"], row["method"]) for row in found] == [
        (OURS_PLAIN, "plain"),
        ("ours-speculative", "prompt-lookup"),
        ("ours-speculative", "draft"),
        ("transformers", "plain"),
        ("transformers", "prompt-lookup"),
    ]
    for row in found:
        assert set(row) >= ROW
        assert (row["precision"], row["prompts"], row["tokens"], row["same_tokens"]) == ("fp32", 2, 18, 18)
        assert row["quartiles"][0] <= row["ms_per_token"] <= row["quartiles"][1]
        assert row["resident_mb"] > 10
    assert report["left_out"] == [
        "ctranslate2 is left out: no module no_such_module; pip install -e '.[peers]'"
    ]
    assert report["engine_versions"].keys() == {OURS_PLAIN, "ours-speculative", "transformers"}
    assert report["settings"]["threads"] == 1
    text = (tmp_path / "out/peers.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("\n| ") == 2 + len(found)
    ElementTree.parse(tmp_path / "out/peers.svg")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engines": "llama"}, "--engines: must be among ours-plain"),
        ({"precisions": "fp32,bf16"}, "--precisions: must be among fp32, int8, int4, got 'bf16'"),
        ({"drafter": "nowhere"}, "--drafter: nowhere has no config.json; expected a draft head's directory"),
        ({"model": "nowhere"}, "--model: nowhere is neither a Hugging Face model directory nor a file .gguf"),
    ],
)
def test_wrong_inputs(
    changed: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n')
    flags = {"model": "nowhere", "prompts": str(prompts), "out": str(tmp_path / "out"), **changed}
    assert peers.main([word for name, value in flags.items() for word in (f"--{name}", value)]) == 2
    assert message in capsys.readouterr().err


def test_a_worker_answers_until_it_is_closed(opened: Worker) -> None:
    opened.open(OPENING)
    assert opened.version == OURS_PLAIN
    assert opened.decode([7, 8], 2) == {"token_ids": [7, 8]}
    opened.close()


@pytest.mark.parametrize(
    ("prompt", "message"), [([0], "ValueError: no zeros"), ([1], "has ended; .*log has")]
)
def test_a_worker_that_fails(opened: Worker, prompt: list[int], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        opened.decode(prompt, 2)
    opened.close()


def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    """The real worker, with a path that is none."""
    with closing(Worker(tmp_path / "log")) as worker, pytest.raises(WorkerError, match="nowhere"):
        worker.open(OPENING)


def test_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens beyond the number asked for are cut off, and those of the first delivery are counted."""

    def open_model(opening: Opening) -> Decode:
        assert opening == OPENING

        def decode(prompt_ids: Any, max_new_tokens: int, receive: Receive) -> None:
            for chunk in ([5, 6], [7], [8, 9]):
                receive(chunk)

        return decode

    monkeypatch.setitem(ENGINES, OURS_PLAIN, dataclasses.replace(ENGINES[OURS_PLAIN], open_model=open_model))
    requests = [{"open": OPENING.__dict__}, {"decode": {"prompt_ids": [1], "max_new_tokens": 4}}]
    answers = io.StringIO()
    assert worker_module.serve(io.StringIO("\n".join(map(json.dumps, requests))), answers) == 0
    opened, decoded = map(json.loads, answers.getvalue().splitlines())
    assert set(opened) == {"version", "resident_mb"}
    assert (decoded["token_ids"], decoded["first"]) == ([5, 6, 7, 8], 2)
    assert decoded["decode_ms"] >= 0
    assert Run(0, 1, **decoded).ms_per_token == decoded["decode_ms"] / 2


def test_a_request_before_a_model_is_open() -> None:
    answers = io.StringIO()
    request = {"decode": {"prompt_ids": [1], "max_new_tokens": 4}}
    assert worker_module.serve(io.StringIO(json.dumps(request)), answers) == 1
    assert json.loads(answers.getvalue()) == {"error": "ValueError: no model is open"}


def make_run(prompt: int, token_ids: list[int], decode_ms: float) -> Run:
    return Run(prompt, 30 * (prompt + 1), token_ids, 1, 100.0, decode_ms, 100.0)


def test_rows() -> None:
    ours = Contender(ENGINES[OURS_PLAIN], "int8", "plain")
    other = Contender(ENGINES["llama.cpp"], "int8", "prompt-lookup")
    alone = Contender(ENGINES["llama.cpp"], "int4", "plain")
    runs = {
        ours: [make_run(0, [1, 2, 3], 4.0), make_run(1, [4, 5, 6], 8.0), make_run(0, [1, 2, 3], 6.0)],
        other: [make_run(0, [1, 2, 9], 2.0), make_run(1, [4, 5, 6], 2.0)],
        alone: [make_run(0, [7], 0.0)],
    }
    found = rows(runs)
    # The medians of the prompts are 2.5 and 4 ms a token.
    assert (found[0]["ms_per_token"], found[0]["quartiles"]) == (3.25, [2.875, 3.625])
    assert (found[0]["tokens"], found[0]["same_tokens"]) == (6, 6)
    # 30 and 60 tokens in a tenth of a second.
    assert (found[0]["prompt_ms"], found[0]["prompt_tokens_per_s"]) == (100, 450)
    assert (found[1]["tokens"], found[1]["same_tokens"], found[1]["same_share"]) == (6, 5, 5 / 6)
    assert (found[1]["form"], found[1]["method"]) == ("Q8_0", "prompt-lookup")
    # Without ours in that precision there is nothing to compare with, and one token has no time of its own.
    assert (found[2]["same_tokens"], found[2]["ms_per_token"]) == (None, None)
    # Nor has a text without a token, which an engine may answer with.
    (silent,) = rows({alone: [Run(0, 30, [], 0, 0.0, 0.0, None)]})
    assert (silent["tokens"], silent["ms_per_token"], silent["prompt_tokens_per_s"]) == (0, None, None)
    settings = {"prompts": 2, "prompt_tokens": 45, "max_new_tokens": 3, "threads": 1}
    text = markdown({"rows": found, "settings": settings, "engine_versions": {}, "left_out": ["one"]})
    assert "| llama.cpp | int4 | Q4_0 | plain | ? | ? | 300 | 1 | ? | 100 |" in text
    ElementTree.fromstring(figure(found))


def test_quartiles_and_same_beginnings() -> None:
    assert quartiles([]) == (None, None, None)
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert same_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert same_beginning([1, 2], [1, 2, 4]) == 2


def test_models_are_kept(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = partial(Worker, command=(sys.executable, "-c", FAKE))
    monkeypatch.setattr("benchmarks.peers.models.Worker", fake)
    models = Models(tmp_path / "models", tiny_model_dir, None)
    models.root.mkdir()
    path = models.ensure(ENGINES["llama.cpp"], "plain", "int8")
    (path / "kept").touch()
    assert models.ensure(ENGINES["llama.cpp"], "prompt-lookup", "int8") == path
    assert (path / "kept").is_file()
    # Both of ours without a head have the same files.
    ours = models.ensure(ENGINES[OURS_PLAIN], "plain", "int8")
    (ours / "kept").touch()
    assert models.ensure(ENGINES[OURS_SPECULATIVE], "prompt-lookup", "int8") == ours
    assert (ours / "kept").is_file()
    # Ours with other scales are other files; nobody else's are.
    blocks = dataclasses.replace(models, scales={"int8": BLOCKS, "int4": "128"})
    assert blocks.ensure(ENGINES["llama.cpp"], "plain", "int8") == path
    assert blocks.ensure(ENGINES[OURS_PLAIN], "plain", "int8").name == "ours-int8-blocks"
    assert blocks.ensure(ENGINES[OURS_PLAIN], "plain", "int4").name == "ours-int4-128"
    assert models.ensure(ENGINES[OURS_PLAIN], "plain", "int8").name == "ours-int8"
    # A conversion that fails leaves nothing that looks like a model.
    failing = partial(Worker, command=(sys.executable, "-c", "1 / 0"))
    monkeypatch.setattr("benchmarks.peers.models.Worker", failing)
    with pytest.raises(WorkerError, match="has ended"):
        models.ensure(ENGINES["llama.cpp"], "plain", "int4")
    assert not (models.root / "llama.cpp-int4").exists()


@pytest.fixture
def written(tiny_model_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Writes the tiny model with a tokenizer that merges, as GGUF wants it."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"] = vocabulary.pop("Ń")
    tokenizer["model"]["merges"] = [["a", "b"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")

    def write(form: str) -> Path:
        path = tmp_path / f"{form}.gguf"
        write_gguf(directory, path, form)
        return path

    return write


@pytest.mark.parametrize(("form", "tolerance"), [("F32", 0), ("Q8_0", 0.01), ("Q4_0", 0.15), ("Q4_1", 0.1)])
def test_gguf_is_read_back(
    written: Callable[[str], Path], tiny_model_dir: Path, form: str, tolerance: float
) -> None:
    import gguf
    from safetensors.numpy import load_file

    reader = gguf.GGUFReader(written(form))
    found = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
    weights = load_file(tiny_model_dir / "model.safetensors")
    assert len(found) == len(weights)
    for name, of_model in (
        ("token_embd", "model.embed_tokens"),
        ("output", "lm_head"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
    ):
        expected = weights[f"{of_model}.weight"]
        np.testing.assert_allclose(found[f"{name}.weight"], expected, atol=tolerance * np.abs(expected).max())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.attention.head_count_kv"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == 258
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert "Q: " in fields["tokenizer.chat_template"]


def test_gguf_is_the_same_model_in_transformers(written: Callable[[str], Path], tiny_model_dir: Path) -> None:
    """Its reader undoes the order of the rows of queries and keys."""
    from safetensors.torch import load_file

    path = written("F32")
    directory = hugging_face_directory(path, path.parent / "models")
    assert directory.name == path.stem
    found = load_file(directory / "model.safetensors")
    expected = load_file(tiny_model_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(bool((found[name] == expected[name]).all()) for name in expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "qwen2"}, "type llama"),
        ({"attention_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary"),
        ({"intermediate_size": 100}, "multiples of 32"),
    ],
)
def test_models_without_a_gguf_form(changed: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModelError, match=message):
        check({**config, **changed}, "Q8_0")

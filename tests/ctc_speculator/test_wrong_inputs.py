"""Wrong inputs of every command: one line, status 2, nothing written, no traceback.

Those of training and of models that only a library can judge stand beside the tests of training and export.
"""

import json
import re
from pathlib import Path

import pytest

from ctc_speculator.__main__ import main

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
CONFIG = b'{"model_type": "llama"}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)

BUILD = "build --model {d}/model --out {d}/out"
GENERATE = "generate --bundle {d}/absent --prompt x"
PROFILE = "profile --bundle {d}/absent --prompts {d}/prompts.jsonl --out {d}/report"
SERVE = "serve --bundle {d}/absent"
BENCH = "bench --model {d}/model --heads {d}/head --prompts {d}/prompts.jsonl --out {d}/out"
PUBLISH = "publish {d}/head --repository a/b --model c/d"

WRONG = {
    # ctc itself
    "trian": "ctc: must be one of .*, got 'trian'; did you mean train?",
    "openai-server": "ctc: must be one of train, distill, .*, got 'openai-server'; did you mean openai?",
    "--verbose": "ctc: must be one of .*, got '--verbose'",
    # build
    "build": "the following arguments are required: --model, --out",
    "build --model {d}/model": "the following arguments are required: --out",
    f"{BUILD} --modle x": "unrecognized arguments: --modle x",
    "build --model {d}/absent --out {d}/out": "--model: .*/absent has no config.json; expected a",
    "build --model {d}/text.txt --out {d}/out": "--model: .*/text.txt is a file; expected a Hugging",
    "build --model absent/model --out {d}/out": "--model: absent/model is no directory .* from the hub: ",
    "build --model {d}/model.gguf --out {d}/out": "--model: .*/model.gguf is cut short or damaged",
    "build --model {d}/gguf --out {d}/out": "--model: .*/gguf has no config.json and holds GGUF",
    "build --model {d}/empty --out {d}/out": "--model: .*/empty has no config.json",
    "build --model {d}/no_tokenizer --out {d}/out": "--model: .*/no_tokenizer has no tokenizer.json; copy",
    "build --model {d}/cut --out {d}/out": "--model: .*model.safetensors has 30 bytes and must have over",
    "build --model {d}/web_page --out {d}/out": "--model: .*model.safetensors is no safetensors file;",
    f"{BUILD} --drafter {{d}}/absent": "--drafter: .*/absent has no config.json; expected the",
    f"{BUILD} --drafter {{d}}/no_weights": "--drafter: .*/no_weights has no model.safetensors",
    f"{BUILD} --drafter {{d}}/cut_head": "--drafter: .*model.safetensors has 30 bytes and must have over",
    f"{BUILD} --drafter {{d}}/model": "--drafter: .*/model is a model; expected the directory of a draft",
    f"{BUILD} --drafter {{d}}/head": "--drafter: .*/head/config.json: field 'intermediate_size' is missing",
    "build --model {d}/short --out {d}/out": "--model: .*model.safetensors has .* bytes and must have ..;",
    "build --model {d}/model --out {d}/text.txt": "--out: .*/text.txt is a file; expected a directory",
    "build --model {d}/model --out {d}/text.txt/a": "--out: .*/text.txt is a file; expected a directory",
    "build --model {d}/model --out {d}/head": "--out: .*/head is not empty and is no engine bundle",
    f"{BUILD} --target tpu": "--target: must be auto or one of onnxruntime, .*, got 'tpu'",
    f"{BUILD} --precision int3": "--precision: invalid choice: 'int3'",
    f"{BUILD} --target onnxruntime --precision fp8": "--precision: onnxruntime supports .*, got 'fp8'",
    f"{BUILD} --step-nodes few": "--step-nodes: must be whole numbers with .*, or none; got 'few'",
    f"{BUILD} --top-k many": "--top-k: invalid int value: 'many'",
    f"{BUILD} --max-context": "--max-context: expected one argument",
    # generate
    "generate": "the following arguments are required: --bundle",
    "generate --bundle {d}/absent": "one of the arguments --prompt --prompts is required",
    GENERATE: "/absent is no engine bundle: bundle.json is missing",
    "generate --bundle {d}/text.txt --prompt x": "/text.txt is no engine bundle",
    "generate --bundle {d}/model --prompt x": "/model is no engine bundle: bundle.json is missing",
    "generate --bundle {d}/broken_bundle --prompt x": "bundle.json is not valid JSON",
    f"{GENERATE} --prompts {{d}}/prompts.jsonl": "--prompts: not allowed with argument --prompt",
    f"{GENERATE} --json --show-drafts": "--show-drafts: not allowed with argument --json|--json: not allowed",
    f"{GENERATE} --log-probs": "--log-probs: is written with --json only",
    f"{GENERATE} --temperature hot": "--temperature: invalid float value: 'hot'",
    f"{GENERATE} --temperature nan": "temperature: must be a number from 0 on, got nan",
    f"{GENERATE} --top-p 2": "top_p: must be above 0 and at most 1, got 2.0",
    f"{GENERATE} --num-nodes 0": "--num-nodes: must be a whole number of at least 1, got '0'",
    f"{GENERATE} --json-schema {{d}}/text.txt": "--json-schema: must be JSON for json_schema, got 'text'",
    f"{GENERATE} --method magic": "--method: invalid choice: 'magic'",
    "generate --bundle {d}/absent --prompts {d}/absent.jsonl": "--prompts: .*absent.jsonl cannot be read",
    "generate --bundle {d}/absent --prompts {d}/text.txt": "text.txt:1: expected a JSON object",
    "generate --bundle {d}/absent --prompts {d}/none.jsonl": "--prompts: .*none.jsonl holds no prompt",
    "generate --bundle {d}/absent --prompts {d}": "--prompts: .* cannot be read: Is a directory",
    # profile
    "profile --bundle {d}/absent": "the following arguments are required: --prompts, --out",
    PROFILE: "/absent is no engine bundle: bundle.json is missing",
    f"{PROFILE} --num-nodes 4,many": "--num-nodes: must be a whole number of at least 1, got 'many'",
    f"{PROFILE} --num-nodes 1000": "--num-nodes: must be at most 256 nodes, got 1000",
    f"{PROFILE} --transform best": "--transform: invalid choice: 'best'",
    f"{PROFILE} --search best": "--search: invalid choice: 'best'",
    f"{PROFILE} --repeats 0": "--repeats: must be a whole number of at least 1, got '0'",
    # serve, client, openai, chat
    "serve": "the following arguments are required: --bundle",
    SERVE: "/absent is no engine bundle: bundle.json is missing",
    f"{SERVE} --max-num-seqs 0": "--max-num-seqs: must be a whole number of at least 1, got '0'",
    f"{SERVE} --http-port web": "--http-port: must be a whole number between 1 and 65535, got 'web'",
    "client": "the following arguments are required: PROMPT",
    "client x --max-tokens lots": "--max-tokens: must be a whole number between 1 and 2147483647, got 'lots'",
    "client x --url localhost:1": "--url: no server at localhost:1 serves ctc_llm: ",
    "page --url localhost:1": "--url: no server at localhost:1 serves ctc_llm: ",
    "openai --port web": "--port: must be a whole number between 1 and 65535, got 'web'",
    "openai --model other": "--model: invalid choice: 'other'",
    "openai --url localhost:1": "--url: no server at localhost:1 serves ctc_llm: ",
    "page --port web": "--port: must be a whole number between 1 and 65535, got 'web'",
    # bench and publish
    "bench --out {d}/out": "the following arguments are required: --prompts",
    BENCH.replace("{d}/model", "{d}/absent"): "--model: .*/absent has no config.json",
    BENCH.replace("{d}/prompts", "{d}/absent"): "--prompts: .*absent.jsonl cannot be read",
    f"{BENCH} --nodes none": "--nodes: must be a whole number of at least 1, got 'none'",
    BENCH.replace("{d}/out", "{d}/text.txt"): "--out .*text.txt is a file; expected a directory",
    "publish {d}/head": "the following arguments are required: --repository, --model",
    PUBLISH.replace("{d}/head", "{d}/absent"): "/absent is no drafter checkpoint: config.json is missing",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    files: dict[str, bytes] = {
        "text.txt": b"text",
        "prompts.jsonl": b'{"prompt": "How many?"}',
        "none.jsonl": b"\n",
        "model.gguf": b"GGUF",
        "gguf/MODEL.GGUF": b"GGUF",
        "broken_bundle/bundle.json": b"{",
        "no_tokenizer/config.json": CONFIG,
        "no_weights/config.json": b"{}",
    }
    for name, weights in (
        ("model", SAFETENSORS),
        ("cut", SAFETENSORS[:30]),
        ("short", SAFETENSORS[:-1]),
        ("web_page", b"<!DOCTYPE html>"),
    ):
        files |= {f"{name}/config.json": CONFIG, f"{name}/tokenizer.json": b"{}"}
        files[f"{name}/model.safetensors"] = weights
    files |= {"head/config.json": b"{}", "head/model.safetensors": SAFETENSORS}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    head = dict.fromkeys(sizes, 8) | {"target_layer_ids": [0], "base_num_layers": 1}
    files |= {
        "cut_head/config.json": json.dumps(head).encode(),
        "cut_head/model.safetensors": SAFETENSORS[:30],
    }
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    (place / "empty").mkdir()
    return place


def test_there_are_sixty() -> None:
    assert len(WRONG) >= 60


@pytest.mark.parametrize("arguments", WRONG)
def test_one_line_and_nothing_written(
    arguments: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(place.rglob("*"))
    try:
        status = main(arguments.format(d=place).split())
    except SystemExit as exit_:
        status = int(str(exit_.code))
    written = capsys.readouterr()
    (line,) = written.err.splitlines()
    command = arguments.split()[0]
    start = "ctc: " if WRONG[arguments].startswith("ctc: ") else f"ctc {command}: "
    assert status == 2
    assert line.startswith(start)
    assert re.search(WRONG[arguments], line), line
    assert written.out == ""
    assert sorted(place.rglob("*")) == before

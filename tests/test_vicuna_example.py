"""The commands of examples/vicuna.md, run as written on a tiny model with Vicuna's files.

Every ```bash block is run, except those under a comment ``<!-- not tested: ... -->``. Three things are
replaced: the working directory, the server's address, and the numbers in ``TINY``.
"""

import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer

from training.config import parse_config

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "vicuna.md"
WORK = "build/vicuna"
SERVER = "http://localhost:8000/v1"
NOT_TESTED = {"installs", "downloads", "vLLM", "GPUs"}
TINY = {
    "--steps": "2",
    "--warmup": "1",
    "--batch-size": "2",
    "--max-new-tokens": "6",
    "--nodes": "4,60",
    "--start-size": "8",
}
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
QUESTIONS = ["How many days are in four weeks?", "And in five?", "Name a colour.", "Why is the sea salty?"]
# The keys of Vicuna-7B v1.3's config.json; the sizes and the vocabulary are not Vicuna's.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}
TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": False},
    "clean_up_tokenization_spaces": False,
    "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
    "model_max_length": 2048,
    "pad_token": None,
    "padding_side": "right",
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": {"__type": "AddedToken", "content": "<unk>", "normalized": False},
}


# The ids of Llama's byte tokens.
BYTES = slice(3, 259)


@dataclass(frozen=True)
class Block:
    """A ```bash block; ``reason`` says why it is not run, and is None for a block that is."""

    text: str
    reason: str | None


def blocks() -> list[Block]:
    pattern = r"(?:<!-- not tested: ([^>]*) -->\n)?```bash\n(.*?)```"
    found = re.findall(pattern, EXAMPLE.read_text(encoding="utf-8"), re.DOTALL)
    return [Block(text, reason or None) for reason, text in found]


def save_tokenizer(directory: Path) -> int:
    """A small BPE like Llama's: unknown characters become bytes, spaces a visible character."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    trained.train_from_iterator([SYSTEM, *QUESTIONS, "USER: ASSISTANT:"], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    LlamaTokenizer(vocab=model["vocab"], merges=merges).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return len(model["vocab"])


def save_model(directory: Path) -> None:
    """Random half-precision weights in two .bin shards, with the buffers that old checkpoints hold."""
    size = save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    torch.manual_seed(0)
    # At the usual initializer_range greedy text is one token, repeated.
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory, initializer_range=0.3)).half()
    weights = dict(model.state_dict())
    # Byte tokens are never the likeliest, because random bytes are not valid text.
    weights["lm_head.weight"][BYTES] = 0
    for layer in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    names = list(weights)
    index: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, directory / file)
        index |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_data(directory: Path) -> None:
    """A few conversations in ShareGPT's format and questions in MT-bench's."""
    directory.mkdir()
    conversations = [
        {
            "id": f"QWJhYvA_{i}",
            "conversations": [
                {"from": "gpt", "value": "an answer to nothing"} if i % 4 == 0 else None,
                {"from": "human", "value": f"{QUESTIONS[i % 4]} ({i})"},
                {"from": "gpt", "value": f"\n\nThat is {i}."},
                {"from": "human", "value": QUESTIONS[(i + 1) % 4]},
                {"from": "gpt", "value": "I do not know."},
            ],
        }
        for i in range(12)
    ]
    for row in conversations:
        row["conversations"] = [message for message in row["conversations"] if message]
    sharegpt = directory / "ShareGPT_V4.3_unfiltered_cleaned_split.json"
    sharegpt.write_text(json.dumps(conversations, indent=2))
    bench = [
        {"question_id": 81 + i, "category": "writing", "turns": [text, "Say it again."], "reference": []}
        for i, text in enumerate(QUESTIONS[:2])
    ]
    (directory / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the example downloads."""
    directory = tmp_path_factory.mktemp("vicuna")
    (directory / "model").mkdir()
    save_model(directory / "model")
    save_data(directory / "data")
    return directory


@pytest.fixture
def server() -> Iterator[str]:
    """A stand-in for the served model. Its answers begin with a space, as those of Llama's tokenizer do."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send({"object": "list", "data": []})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = f" You ask: {body['messages'][-1]['content']}"
            message = {"role": "assistant", "content": content}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            self._send(
                {"id": "x", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
            )

        def _send(self, reply: Any) -> None:
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    http.shutdown()
    thread.join()
    http.server_close()


def shrink(text: str, work: Path, server: str) -> str:
    """The text of a block with its paths, its server and its numbers replaced."""
    text = text.replace(WORK, str(work)).replace(SERVER, server)
    for flag, value in TINY.items():
        text = re.sub(rf"({flag}) \S+", rf"\1 {value}", text)
    return text


def run_here(words: list[str]) -> None:
    """Run ``python -m MODULE ...`` or ``python FILE.py ...`` in this process, from the file's first line.

    A process of its own would only add the seconds in which it imports torch.
    """
    assert words[0] == "python", words
    # accelerate keeps its first settings for the life of a process.
    AcceleratorState._reset_state(reset_partial_state=True)
    module = words[1] == "-m"
    argv = words[2:] if module else words[1:]
    run = functools.partial(runpy.run_module, alter_sys=True) if module else runpy.run_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            run(argv[0], run_name="__main__")
    assert not ended.value.code, words


def run_in_bash(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")
def test_the_commands_run(
    work: Path,
    server: str,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tested = [block for block in blocks() if block.reason is None]
    assert len(tested) >= 6
    for block in tested:
        text = shrink(block.text, work, server)
        if "training.distill" in text:  # one block as a user runs it; this one needs no torch
            run_in_bash(text)
            continue
        engine = work / "engine"  # the table needs its two graphs once more
        with copied_graphs(**({"backbone": engine} if engine.exists() else {})):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line)
                if "training.train" in words:
                    # The page has two ways to train this head, of which a user takes one.
                    out = words[words.index("--out") + 1]
                    for directory in (out, f"{out}.run"):
                        shutil.rmtree(directory, ignore_errors=True)
                run_here(words)
    answers = [json.loads(line) for line in (work / "data" / "distilled.jsonl").read_text().splitlines()]
    assert len(answers) == 24
    assert json.loads((work / "heads" / "ctc" / "config.json").read_text())["drafter_type"] == "ctc"
    assert (work / "profile" / "report.html").is_file()
    table = json.loads((work / "table" / "methods.json").read_text(encoding="utf-8"))
    assert {row["method"] for row in table["rows"]} >= {"ctc", "medusa"}


def test_what_is_not_tested_has_a_reason_and_flags_that_exist() -> None:
    skipped = [block for block in blocks() if block.reason is not None]
    assert {block.reason for block in skipped} == NOT_TESTED
    (launch,) = (block.text for block in skipped if block.reason == "GPUs")
    words = shlex.split(launch.replace("\\\n", " "))
    assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    config = parse_config(words[words.index("training.train") + 1 :], "")
    (single,) = (
        b.text
        for b in blocks()
        if b.reason is None and "--labels data --out build/vicuna/heads/ctc" in b.text
    )
    words = shlex.split(single.replace("\\\n", " "))
    alone = parse_config(words[words.index("training.train") + 1 :], "")
    assert (config.heads, config.data, config.out) == (alone.heads, alone.data, alone.out)


def test_paths_named_in_the_text_exist() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (EXAMPLE.parent / link).is_file(), link
    named = set(re.findall(r"(?:examples|training|export)/[\w/.]+\.(?:py|yaml|jinja)", text))
    assert len(named) >= 4
    for path in named:
        assert (ROOT / path).is_file(), path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose tokenizer the example's own script has converted, twice."""
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    script = example_script()
    assert script.main([str(directory)]) == 0
    assert script.main([str(directory)]) == 0
    return directory


def example_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "vicuna_tokenizer", ROOT / "examples" / "vicuna_tokenizer.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_prompt_is_vicunas(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)

    def render(*messages: tuple[str, str], generation: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation))

    one = f"<s>{SYSTEM} USER: Hello! ASSISTANT:"
    user, answer = ("user", "Hello!"), ("assistant", " Hi.")
    assert render(user) == one
    assert render(user, answer, generation=False) == f"{one} Hi.</s>"
    assert render(user, answer, ("user", "And?")) == f"{one} Hi.</s>USER: And? ASSISTANT:"
    assert render(("assistant", "lost"), user) == one
    assert render(("system", "Be brief."), user) == "<s>Be brief. USER: Hello! ASSISTANT:"


def test_pieces_between_special_tokens_begin_with_a_space(converted: Path) -> None:
    """They do in transformers, and in the tokenizer.json that a bundle contains."""
    text = "<s>A chat</s>USER: And in five? \u2603"
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = "".join(tokenizer.convert_ids_to_tokens(ids))
    assert tokens == "<s>\u2581A\u2581chat</s>\u2581USER:\u2581And\u2581in\u2581five?\u2581<0xE2><0x98><0x83>"
    file = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert file.encode(text, add_special_tokens=False).ids == ids


def test_a_directory_without_a_usable_tokenizer_is_one_line(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = example_script()
    assert script.main([str(tmp_path)]) == 2
    assert "has no tokenizer_config.json" in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert script.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        error == "vicuna_tokenizer: tokenizer.model is read with sentencepiece: pip install sentencepiece\n"
    )

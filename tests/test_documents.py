"""The documents: commands parse, quickstart and own-model page run, messages of the troubleshooting exist."""

import argparse
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctc_speculator.__main__ import COMMANDS, main
from tests.document_commands import DOCUMENTS, ROOT, blocks, shell_blocks
from triton_repo.triton.tensors import ONLY, STATISTICS, TEXT, inputs_of

# Programs of others. What they are given cannot be checked without them.
FOREIGN = {
    "cd", "curl", "docker", "git", "head", "hf", "kubectl", "source", "tensorrt-edgellm-build",
    "tensorrt-edgellm-export", "tritonserver", "trtllm-serve", "vllm",
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Parsed(BaseException):
    """Raised in place of what a command does once its arguments are parsed."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_known_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        _, left = real(parser, args, namespace)
        if left:
            parser.error(f"unrecognized arguments: {left}")
        raise Parsed

    def parse_known_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        real(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def commands() -> Iterator[Any]:
    for document in DOCUMENTS:
        for block in shell_blocks(document):
            for words in block.commands():
                yield pytest.param(words, id=f"{document.name}: {' '.join(words)[:60]}")


def modules_arguments(words: list[str]) -> tuple[str, list[str]]:
    """The module or file that a command runs, and its arguments."""
    if words[0] in ("accelerate", "torchrun"):
        words = words[words.index("-m") + 1 :]
        return words[0], words[1:]
    return (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])


@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")
@pytest.mark.parametrize("words", list(commands()))
def test_a_command_is_one(words: list[str], only_parse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program = words[0]
    if program in FOREIGN:
        return
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in words[1:] if "=" not in word):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
        return
    if program == "pip":
        named = {
            extra for word in words for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[.*?\]", word)))
        }
        assert named <= set(PROJECT["optional-dependencies"])
        return
    if program == "ctc":
        assert words[1] in COMMANDS
        with pytest.raises(Parsed):
            main(words[1:])
        return
    if program.endswith("env/bin/python"):  # of vLLM
        return
    assert program in ("python", "accelerate", "torchrun"), words
    module, arguments = modules_arguments(words)
    if module in ("build", "pytest", "pip", "sglang.launch_server"):
        return
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    start = runpy.run_path if module.endswith(".py") else runpy.run_module
    with pytest.raises(Parsed):
        start(module, run_name="__main__")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_block_names_its_language(document: Path) -> None:
    """A block of commands without a language would not be checked."""
    text = re.sub(r"^````.*?^````$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert all(fences[::2]), fences


def test_there_are_commands() -> None:
    """The pattern for blocks finds them."""
    assert len(list(commands())) > 80


def run(document: str, small: dict[str, list[str]], replaced: dict[str, str]) -> None:
    """Run the blocks of a document in order; ``small`` has arguments for single commands."""
    for block in blocks(ROOT / "docs" / document):
        text = block.text
        for old, new in replaced.items():
            text = text.replace(old, new)
        if block.reason is not None or block.language not in ("bash", "python"):
            continue
        if block.language == "python":
            exec(compile(text, document, "exec"), {})
            continue
        for program, name, *arguments in type(block)("bash", text, None).commands():
            assert program == "ctc"
            assert main([name, *arguments, *small[name]]) == 0, (name, arguments)


@pytest.mark.slow
def test_the_quickstart_runs(
    tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/demo").mkdir(parents=True)
    (tmp_path / "build/demo/bundle").symlink_to(tiny_bundle_dir)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    short = ["--max-new-tokens", "8"]
    run("quickstart.md", {"generate": short, "profile": [*short, "--max-prompts", "1"]}, {})
    assert "tokens a step" in capsys.readouterr().err
    assert (tmp_path / "build/report/report.html").is_file()


@pytest.mark.slow
def test_the_way_to_your_own_model_runs(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversations.jsonl").write_text('{"prompt": "How many days?"}\n' * 8)
    (tmp_path / "prompts.jsonl").write_text('{"question": "How many weeks?"}\n')
    small = {
        "train": ["--steps", "2", "--warmup", "1", "--batch-size", "2", "--max-new-tokens", "8"],
        "build": [],
        "generate": ["--max-new-tokens", "8"],
        "profile": ["--max-new-tokens", "8", "--num-nodes", "4"],
    }
    run("own-model.md", small, {"MODEL_DIR": str(tiny_model_dir)})
    assert (tmp_path / "heads/ctc/README.md").is_file()
    assert (tmp_path / "report/report.html").is_file()


def quoted_messages() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)


def test_messages_of_the_troubleshooting_are_ours() -> None:
    """Each part between words in capitals stands in the code, so a changed message is found here."""
    packages = ["ctc_speculator", "drafters", "training", "export", "runtime"]
    packages += ["triton_repo", "integrations"]
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message over several lines
    assert len(quoted_messages()) > 30
    for message in quoted_messages():
        if message == "No space left on device":
            continue  # the system's own words
        for part in re.split(r"\b[A-Z]{4,}\b", message):
            assert part.strip() in code, message


def test_the_tables_of_tensors_are_those_of_the_server() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \| ((?:BYTES|INT32|FP32|UINT64|BOOL)\b[^|]*?) \|", text, re.MULTILINE)
    listed = {
        name: types.split()[0].rstrip(",") for names, types in rows for name in re.findall(r"`(\w+)`", names)
    }
    # Those that may only ask for nothing are named in one sentence.
    known = {tensor.name: tensor.datatype for tensor in (*inputs_of(TEXT), *STATISTICS)}
    ignored = {"pad_id", "length_penalty", "return_num_input_tokens", "return_num_output_tokens", "bad_words"}
    del listed["text_output"], listed["output_ids"], listed["ctc_llm_tokens"]
    assert listed == {name: kind for name, kind in known.items() if name not in {*ONLY, *ignored}}

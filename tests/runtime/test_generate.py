"""The command line: text, JSON, and one clear line for what cannot be used."""

import io
import json
import re
from pathlib import Path

import pytest

from runtime.core.errors import RequestError
from runtime.core.prompts import Prompt, read_prompts
from runtime.decode.sequence import Chunk, Piece
from runtime.decoder import SpeculativeDecoder
from runtime.generate import DRAFTED, RESET, main, print_stream
from runtime.text import PromptTokenizer

# Without a number of nodes, loading would measure the times of steps.
FEW_NODES = ("--num-nodes", "4", "--threads", "1")


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["first", "second"]}, {"question": "how\u2028many?"}, {"prompt": "p"}, {"text": "raw"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def test_prompt_files(prompts_file: Path) -> None:
    prompts = read_prompts(prompts_file)
    assert [prompt.text for prompt in prompts] == ["first", "how\u2028many?", "p", "raw"]
    assert [prompt.raw for prompt in prompts] == [False, False, False, True]


def test_texts_that_follow_a_grammar(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["ä", "b"]}', encoding="utf-8")
    grammar.write_text('start: "x"{3}', encoding="utf-8")
    command = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--prompt", "How many?", "--json"]
    for option, text in (
        ("--json-schema=" + str(schema), '"ä"|"b"'),
        ("--grammar=" + str(grammar), "xxx"),
        ("--regex=[ab]{2}", "[ab]{2}"),
    ):
        assert main([*command, option]) == 0
        assert re.fullmatch(text, json.loads(capsys.readouterr().out)["text"])
    schema.write_text("[", encoding="utf-8")
    assert main([*command, "--json-schema", str(schema)]) == 2
    assert capsys.readouterr().err == "generate: --json-schema: must be JSON for json_schema, got '['\n"
    assert main([*command, "--grammar", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none cannot be read: No such file or directory\n")


def test_conversations_up_to_the_last_user(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    system, first, answer, last = (
        {"role": role, "content": text}
        for role, text in (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"messages": [system, first, answer, last, answer]}, {"conversations": sharegpt}, {"text": "t"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    long, short, raw = read_prompts(path)
    assert long == Prompt("c", before=(system, first, answer))
    assert short == Prompt("a")
    assert long.messages == [system, first, answer, last]
    assert long.with_system("other") == long
    assert short.with_system("s") == Prompt("a", before=(system,))
    assert raw.with_system("s") == raw == Prompt("t", raw=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b'{"prompt": "a"}\n\xff\xfe', "not UTF-8"),
        (b'{"prompt": "a"}\nnonsense', ":2: expected a JSON object"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", ":1: expected a JSON object"),
        (b"[" * 100_000, ":1: expected a JSON object"),
        (b'{"other": "a"}', ":1: expected an object with turns"),
        (b'{"prompt": 3}', ":1: prompt must hold text, got 3"),
        (b'{"turns": []}', ":1: turns must hold text"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', ":1: messages must hold a message of a user"),
        (b'{"conversations": "a"}', ":1: conversations: expected a list of messages, got 'a'"),
        (b'{"question": "  "}', ":1: question must not be empty"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_prompts(path)


def test_the_system_s_message_is_read(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --system, or in the file, the text is that of the whole conversation in the template."""
    base = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--json", "--max-new-tokens", "12"]
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "how many?"}]
    path.write_text(json.dumps({"messages": messages}))
    texts = []
    for options in (["--prompts", str(path)], ["--prompt", "how many?", "--system", "Be brief."]):
        assert main([*base, *options]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    ids = decoder.prompt_tokenizer.encode_messages(messages)
    expected = "".join(chunk.text for chunk in decoder.stream(ids, max_new_tokens=12))
    assert texts == [expected, expected]
    assert main([*base, "--prompt", "how many?"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] != expected
    with pytest.raises(SystemExit):
        main([*base, "--prompt", "how many?", "--system", "Be brief.", "--raw"])
    assert "--system: is for chats" in capsys.readouterr().err


def test_a_prompt_from_stdin(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--json", "--max-new-tokens", "4", "--prompt"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("how mäny?".encode())))
    assert main([*base, "-"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "how mäny?"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main([*base, "-"]) == 2
    assert "generate: --prompt: stdin is not UTF-8 (byte 0)" in capsys.readouterr().err


def test_json_lines(tiny_bundle_dir: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--prompts", str(prompts_file), "--json"]
    outputs = {}
    for method in ("draft", "plain"):
        assert main([*arguments, "--max-new-tokens", "20", "--method", method]) == 0
        outputs[method] = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row["index"] for row in outputs["draft"]] == [0, 1, 2, 3]
    assert [row["prompt"] for row in outputs["draft"]] == ["first", "how\u2028many?", "p", "raw"]
    for drafted, plain in zip(outputs["draft"], outputs["plain"], strict=True):
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["text"] == plain["text"]
        assert {"num_steps", "beta", "ms_per_token"} <= set(drafted)
        assert drafted["prompt"] == plain["prompt"]
        assert plain["num_steps"] == len(plain["token_ids"]) - 1


def test_a_prompt_that_cannot_be_decoded_is_named_before_any_is(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", "b" * 600, "c")))
    command = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--prompts", str(path), "--max-new-tokens", "8"]
    for more in ([], ["--json"]):
        assert main([*command, *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(
            f"generate: {path}: prompt 2: prompt: must be shorter than the context"
        )
        assert captured.err.count("\n") == 1


def test_completions_of_several_prompts_are_separated(
    tiny_bundle_dir: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts_file), "--max-new-tokens", "3"]
    assert main([*arguments, *FEW_NODES]) == 0
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("=== ")]
    assert lines == ["=== 1 of 4: first", "=== 2 of 4: how many?", "=== 3 of 4: p", "=== 4 of 4: raw"]


def test_raw_is_heeded_with_json(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def encode(self: PromptTokenizer, text: str, *, raw: bool = False) -> list[int]:
        seen.append(raw)
        return [1, 2, 3]

    monkeypatch.setattr(PromptTokenizer, "encode", encode)
    command = ["--bundle", str(tiny_bundle_dir), *FEW_NODES, "--prompt", "a", "--max-new-tokens", "2"]
    for flags in (["--json"], ["--json", "--raw"], ["--raw"]):
        seen.clear()
        assert main([*command, *flags]) == 0
        assert seen[-1] is ("--raw" in flags)


def test_streamed_text(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompt", "hello", "--max-new-tokens", "12", *FEW_NODES]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain.out.removesuffix("\n")
    assert re.search(r"\d+ tokens, prompt read in \d+ ms", plain.err)


def test_drafted_tokens_are_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = Chunk((Piece(1, "drafted", True), Piece(2, " own", False)), None)
    found = print_stream([chunk], show_drafts=True)
    assert capsys.readouterr().out == f"{DRAFTED}drafted{RESET} own\n"
    assert (found.drafted, found.tokens, found.text) == (1, 2, "drafted own")


def test_sampling_options(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompt", "hello", "--max-new-tokens", "12", "--json"]
    arguments += FEW_NODES
    flags = "--temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1"
    flags += " --presence-penalty 0.2 --frequency-penalty 0.1 --log-probs --seed"
    outputs = []
    for seed, method in (("1", "draft"), ("1", "plain"), ("2", "draft")):
        assert main([*arguments, *flags.split(), seed, "--method", method]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"] != outputs[2]["token_ids"]
    assert len(outputs[0]["log_probs"]) == len(outputs[0]["token_ids"])
    assert max(outputs[0]["log_probs"]) <= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--temperature", "nan"], "temperature: must be a number from 0 on, got nan"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens: must be at least 1"),
        (["--prompt", "a", "--max-new-tokens", "100000"], "max_new_tokens: must be at most"),
        (["--prompt", " "], "prompt: must not be empty"),
        (["--prompt", "a\udcff"], "prompt: must be valid Unicode, got a lone surrogate at 1"),
        (["--prompt", "a" * 600, "--max-new-tokens", "8"], "prompt: must be shorter than the context"),
        (["--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--prompt", "a", "--num-nodes", "257"], "num_nodes: must be between 1 and 256, got 257"),
    ],
)
def test_bad_input_is_one_line(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    # Of an option that is given twice, the last counts.
    assert main(["--bundle", str(tiny_bundle_dir), *FEW_NODES, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_raw_takes_no_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "how many?"}
    rows = [{"messages": [message]}, {"messages": [message, message]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--bundle", str(tmp_path), "--prompts", str(path), "--raw"]) == 2
    assert capsys.readouterr().err == (
        "generate: --raw: expected prompts of one text, got 2 messages in prompt 2 of "
        f"{path}, which only the chat template joins\n"
    )


def test_absent_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bundle", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "is no engine bundle: bundle.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("num_nodes", ["0", "-1", "many", "1.5"])
def test_a_number_of_nodes_is_a_whole_number_or_auto(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str], num_nodes: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--bundle", str(tiny_bundle_dir), "--prompt", "a", "--num-nodes", num_nodes])
    captured = capsys.readouterr()
    assert f"--num-nodes: must be a whole number of at least 1, got {num_nodes!r}" in captured.err
    assert captured.out == ""


def test_as_many_nodes_as_pay(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompt", "hello", "--max-new-tokens", "12", "--json"]
    outputs = []
    for options in (["--num-nodes", "auto"], ["--method", "plain", "--threads", "1"]):
        assert main([*arguments, *options]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1]

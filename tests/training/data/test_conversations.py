"""Every data format to prompts and answers; what is wrong with a file, by line and field."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.training.data_files import read_examples
from training.data.sequences import Example
from training.settings import TrainingError

EOS = "<|endoftext|>"
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def texts(examples: list[Example], tokenizer: Any) -> list[tuple[str, str | None]]:
    return [
        (tokenizer.decode(e.prompt_ids), None if e.answer_ids is None else tokenizer.decode(e.answer_ids))
        for e in examples
    ]


def read(tmp_path: Path, tokenizer: Any, *rows: Any) -> list[tuple[str, str | None]]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return texts(read_examples(path, tokenizer), tokenizer)


ONE_TURN = [("Q: hi\nA:", f" hello{EOS}\n")]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [HUMAN, GPT]},
        {
            "id": "x7",
            "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}],
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"question": "hi", "answer": "hello"},
    ],
)
def test_formats_agree(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> None:
    assert read(tmp_path, tokenizer, row) == ONE_TURN


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi"},
        {"question": "hi", "answer": None},
        {"turns": ["hi", "a second turn needs the model's answer to the first"]},
        {"conversations": [HUMAN]},
    ],
)
def test_prompts_without_an_answer(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> None:
    assert read(tmp_path, tokenizer, row) == [("Q: hi\nA:", None)]


def test_every_assistant_turn_is_an_example_with_its_history(tmp_path: Path, tokenizer: Any) -> None:
    turns = [HUMAN, GPT, {"from": "human", "value": "and?"}, {"from": "gpt", "value": "bye"}]
    history = f"Q: hi\nA: hello{EOS}\nQ: and?\nA:"
    assert read(tmp_path, tokenizer, {"conversations": turns}) == [*ONE_TURN, (history, f" bye{EOS}\n")]


def test_system_message_and_order_of_rows(tmp_path: Path, tokenizer: Any) -> None:
    system = {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}
    found = read(tmp_path, tokenizer, system, {"prompt": "two"})
    assert found == [(f" be{EOS}\nQ: hi\nA:", None), ("Q: two\nA:", None)]


def test_text_is_cut_into_prompt_and_rest(tmp_path: Path, tokenizer: Any) -> None:
    assert read(tmp_path, tokenizer, {"text": "0123456789"}, {"text": "x"}) == [("012", "3456789")]


def test_json_array(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"conversations": [HUMAN, GPT]}, {"prompt": "two"}], indent=2))
    assert texts(read_examples(path, tokenizer), tokenizer) == [*ONE_TURN, ("Q: two\nA:", None)]


def test_lines_end_at_newlines_only(tmp_path: Path, tokenizer: Any) -> None:
    """A line may hold U+2028 or U+0085, end in CR LF, be empty; the file may start with a BOM."""
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\r\n{"prompt": "d"}'.encode())
    found = texts(read_examples(path, tokenizer), tokenizer)
    assert found == [("Q: a\u2028b\u0085c\nA:", None), ("Q: d\nA:", None)]


def test_without_a_chat_template(tmp_path: Path, tiny_model_dir: Path) -> None:
    plain = AutoTokenizer.from_pretrained(tiny_model_dir)
    plain.chat_template = None
    row = {"prompt": "hi", "completion": "hello"}
    found = read(tmp_path, plain, row, row | {"finish_reason": "length"}, {"prompt": ""})
    assert found == [("hi", f"\nhello{EOS}"), ("hi", "\nhello")]


def test_an_answer_follows_its_prompt_whatever_a_template_makes_of_the_past(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    rewriting = AutoTokenizer.from_pretrained(tiny_model_dir)
    rewriting.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
    )
    row = {"prompt": "hi", "completion": "hello"}
    assert read(tmp_path, rewriting, row) == [(f"1hi{EOS}", f"hello{EOS}")]


# As Qwen3's, which writes empty thoughts for an answer without closed ones, and as DeepSeek-R1's.
THOUGHTS: dict[str, tuple[str, list[tuple[str, str, str | None]]]] = {
    "before every answer": (
        "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\n"
        "{% else %}A:\n{% if '</think>' not in m['content'] %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:\n{% endif %}",
        [
            ("<think>\nLet me", "length", "<think>\nLet me"),
            ("Yes, ", "length", "<think>\n\n</think>\n\nYes, "),
            ("Yes", "stop", f"<think>\n\n</think>\n\nYes{EOS}"),
            ("<think>\nI see\n</think>\n\nYes", "stop", f"<think>\nI see\n</think>\n\nYes{EOS}"),
        ],
    ),
    "dropped": (
        "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\n"
        "{% else %}A:\n{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:\n<think>\n{% endif %}",
        [
            ("I see\n</think>\n\nYes", "length", "I see\n</think>\n\nYes"),
            ("I see\n</think>\n\nYes", "stop", f"I see\n</think>\n\nYes{EOS}"),
            ("<think>\nI see\n</think>\n\nYes", "stop", f"I see\n</think>\n\nYes{EOS}"),
            ("<think>\nI see", "length", "I see"),
            # No thoughts, which the model would have written first.
            ("Yes", "stop", ""),
        ],
    ),
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_answers_of_models_that_think(tmp_path: Path, tiny_model_dir: Path, kind: str) -> None:
    thinking = AutoTokenizer.from_pretrained(tiny_model_dir)
    thinking.chat_template, answers = THOUGHTS[kind]
    for answer, reason, expected in answers:
        row = {"prompt": "hi", "completion": answer, "finish_reason": reason}
        assert read(tmp_path, thinking, row)[0][1] == expected


@pytest.mark.parametrize("kind", THOUGHTS)
def test_a_verbatim_answer_follows_its_prompt_to_the_letter(
    tmp_path: Path, tiny_model_dir: Path, kind: str
) -> None:
    thinking = AutoTokenizer.from_pretrained(tiny_model_dir)
    thinking.chat_template = THOUGHTS[kind][0]
    question = {"role": "user", "content": "hi"}
    for answer in (" Yes\n", "<think>Let", "I see</think>Yes"):
        row = {"messages": [question, {"role": "assistant", "content": answer}], "verbatim": True}
        assert read(tmp_path, thinking, row)[0][1] == answer + EOS
        assert read(tmp_path, thinking, row | {"finish_reason": "length"})[0][1] == answer


def test_an_answer_that_makes_a_token_with_its_prompt(tmp_path: Path) -> None:
    """The model reads the prompt alone, so the token that both make together never occurs."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "demo/backbone")
    vocabulary = sorted(tokenizer.get_vocab())
    first, second = next(token for token in vocabulary if len(token) == 2 and token.islower())
    tokenizer.chat_template = "{% for m in messages %}{% if m['role'] == 'user' %}Q " + first + "{% else %}"
    tokenizer.chat_template += "{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    assert read(tmp_path, tokenizer, {"prompt": "hi", "completion": second}) == [(f"Q {first}", second + EOS)]


@pytest.mark.parametrize(
    "template",
    [
        # The end of a text that the template cuts is not the end of its answer.
        "{% for m in messages %}{{ m['content'].split('<think>')[0] }}{{ eos_token }}{% endfor %}",
        # The answer twice.
        "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% if loop.index > 1 %}{{ m['content'] }}"
        "{% endif %}{% endfor %}",
    ],
)
def test_templates_that_write_something_else_than_the_answer(
    tmp_path: Path, tiny_model_dir: Path, template: str
) -> None:
    odd = AutoTokenizer.from_pretrained(tiny_model_dir)
    odd.chat_template = template
    row = {"prompt": "hi", "completion": "<think>I see</think>"}
    assert read(tmp_path, odd, row | {"finish_reason": "length"})[0][1] == "<think>I see</think>"
    (found,) = read(tmp_path, odd, row)
    assert found[1] is not None
    assert found[1].startswith(f"<think>I see</think>{EOS}")
    assert "placeholder" not in found[1]


def test_what_the_chat_template_refuses_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    strict = AutoTokenizer.from_pretrained(tiny_model_dir)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TrainingError, match=r"data\.jsonl:1: roles must alternate"):
        read(tmp_path, strict, {"prompt": "hi"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], "expected a JSON object"),
        ("hi", "expected a JSON object"),
        (
            {"query": "hi"},
            "expected a field conversations, messages, prompt, question, instruction, turns or text",
        ),
        ({"prompt": 3}, "'prompt': expected text, got int"),
        ({"prompt": "hi", "completion": ["x"]}, "'completion': expected text, got list"),
        ({"question": None}, "expected a field conversations, messages"),
        ({"text": {}}, "'text': expected text, got dict"),
        ({"turns": "hi"}, "'turns': expected a list, got str"),
        ({"turns": [1]}, "'turns': expected text, got int"),
        ({"conversations": {}}, "'conversations': expected a list, got dict"),
        ({"conversations": ["hi"]}, "'from' of a message is missing"),
        ({"conversations": [{"from": "human"}]}, "'value' of a message is missing"),
        (
            {"conversations": [{"from": "cat", "value": "meow"}]},
            "'from': expected one of human, .* got 'cat'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "'content': expected parts of the type 'text', got 'text'",
        ),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "'role': expected text, got list"),
    ],
)
def test_malformed_rows_name_line_and_field(tmp_path: Path, tokenizer: Any, row: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=rf"data\.jsonl:3: .*{message}") as caught:
        read(tmp_path, tokenizer, {"prompt": "fine"}, {"text": "fine too"}, row)
    assert "\n" not in str(caught.value)


def test_array_errors_name_the_element(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"prompt": "hi"}, {"prompt": 1}]')
    with pytest.raises(TrainingError, match=r"data\.json\[1\]: field 'prompt'"):
        read_examples(path, tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "hi"}\n{"prompt": ', r"data\.jsonl:2: expected a JSON object"),
        (b'{"prompt": "hi"}\nhello\n', r"data\.jsonl:2: expected a JSON object, got 'hello'"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", r"data\.jsonl:1: expected a JSON object"),
        (b"[" * 100_000, r"data\.jsonl is not valid JSON"),
        (b'[{"prompt": "hi"},', r"data\.jsonl is not valid JSON"),
        (b'{"prompt": "caf\xe9"}\n', r"data\.jsonl is not UTF-8 \(byte 15\)"),
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"conversations": []}\n', "holds no prompt$"),
    ],
)
def test_unreadable_files(tmp_path: Path, tokenizer: Any, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=message):
        read_examples(path, tokenizer)


def test_missing_file_and_directory(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(TrainingError, match=r"nothing\.jsonl does not exist"):
        read_examples(tmp_path / "nothing.jsonl", tokenizer)
    with pytest.raises(TrainingError, match="cannot be read"):
        read_examples(tmp_path, tokenizer)
    (tmp_path / "some.parquet").mkdir()
    with pytest.raises(TrainingError, match=r"some\.parquet is a directory; expected a file"):
        read_examples(tmp_path / "some.parquet", tokenizer)
    for suffix in (".jsonl", ""):
        with pytest.raises(TrainingError, match="cannot be read: File name too long"):
            read_examples(Path("x" * 300 + suffix), tokenizer)

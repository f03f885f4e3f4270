"""Reads prompts from the usual formats of conversations.

A file holds JSON lines or a JSON array, plain or packed by gzip, or is a Parquet file; a data set can also be
on the Hugging Face hub. A row is one JSON object in any of these forms:

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": [messages], "completion": [messages]}   TRL, conversational
    {"prompt": ..., "completion": ...}      {"question": ..., "answer": ...}
    {"instruction": ..., "input": ..., "output": ...}   Alpaca; "input" may be empty or absent
    {"turns": [...]}                        {"text": ...}

The content of a message is text, or a list of parts {"type": "text", "text": ...} as OpenAI has it. A
conversation gives one prompt for every assistant turn. Optional fields describe an answer:

    "finish_reason": "length"   the last answer was cut off, so no end of text follows it; neither does one
                                after any other reason, such as "content_filter", except "stop"
    "weight": 0                 in an assistant message: it is history only, neither prompt nor answer
    "verbatim": true            with messages: the last answer follows its prompt to the letter, whatever the
                                chat template makes of answers of the past
    "raw": true                 with prompt and completion: they are plain text, without the chat template
"""

import datetime
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.core.prompts import OPENAI, SHAREGPT, Form, read_content, read_role
from training.settings import TrainingError

# The name of a data set on the hub, possibly with a split: OWNER/NAME or OWNER/NAME:SPLIT.
DATASET_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]:%+-]+)?")
FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")
DEFAULT_SPLIT = "train"
# Of the rows that were left out, this many are shown.
NUM_SHOWN = 3
FORMS = "conversations, messages, prompt, question, instruction, turns or text"
# The finish reasons of an answer that its author ended; None where the row has none.
ENDED = (None, "stop")
# This share of a plain text's tokens is the prompt.
TEXT_PROMPT_SHARE = 0.3
# A template that writes the date of the day writes this one. Otherwise every prompt would be another one on
# the next day, and a run that continues would not find what it has kept.
TEMPLATE_DATE = datetime.datetime(2025, 1, 1)
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# Stands for a message's text while a template is rendered. No template contains this text.
PLACEHOLDER = "Zq7placeholder7qZ"
Message = dict[str, str]


@dataclass(kw_only=True)
class BadRows:
    """Rows that cannot be used. Either the first one is an error, or all are counted and skipped.

    first: the problems of the first NUM_SHOWN of them, each with its place in the data
    """

    skip: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)

    def refuse(self, problem: str) -> None:
        """Count a row that cannot be used. Raises TrainingError unless such rows are skipped."""
        if not self.skip:
            raise TrainingError(problem)
        self.count += 1
        if self.count <= NUM_SHOWN:
            self.first.append(problem)


def is_dataset_name(path: Path) -> bool:
    """Whether a value of ``--data`` names a data set of the hub instead of a file on this machine."""
    try:
        is_path = path.exists() or path.name.endswith(FILE_SUFFIXES) or Path(path.parts[0]).exists()
    except OSError:  # The name is too long for a file, and so for a data set.
        return False
    return not is_path and DATASET_NAME.fullmatch(str(path)) is not None


def read_rows(path: Path, bad: BadRows) -> Iterator[tuple[str, Any]]:
    """Every row of a file, with its place for messages.

    Raises TrainingError for a file that cannot be read, and for a line that is not JSON unless ``bad`` skips
    it.
    """
    if is_dataset_name(path):
        yield from _dataset_rows(str(path))
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        yield from _json_rows(path, _file_text(path), bad)


def brief(value: Any) -> str:
    """The beginning of a row, for messages."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text[:60])


def _file_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise TrainingError(f"--data: {path} does not exist") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TrainingError(f"--data: {path} is no gzip file, or not a whole one: {error}") from error
    except OSError as error:
        raise TrainingError(f"--data: {path} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrainingError(f"--data: {path} is not UTF-8 (byte {error.start})") from error


def _json_rows(path: Path, text: str, bad: BadRows) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TrainingError(f"{path} is not valid JSON: {error}") from error
        for index, row in enumerate(rows):
            yield f"{path}[{index}]", row
        return
    # splitlines() would also split at other separators, such as U+2028, which texts hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad.refuse(f"{path}:{number}: expected a JSON object, got {brief(line)}")
            continue
        yield f"{path}:{number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise TrainingError(f"--data: {path} does not exist")
    if not path.is_file():
        raise TrainingError(f"--data: {path} is a directory; expected a file")
    try:
        import pyarrow.parquet
    except ImportError:
        raise _missing(f"{path} is a Parquet file, which needs the package pyarrow") from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}[{number}]", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(f"--data: {path} cannot be read as Parquet: {reason}") from error


def _dataset_rows(name: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise _missing(
            f"{name} is no file; a data set of this name on the Hugging Face hub needs the package datasets"
        ) from None
    repository, _, split = name.partition(":")
    split = split or DEFAULT_SPLIT
    try:
        rows = datasets.load_dataset(repository, split=split)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(
            f"--data: the split {split!r} of the data set {repository} cannot be loaded (add "
            f":SPLIT for another one): {reason}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name}[{number}]", row


def _missing(problem: str) -> TrainingError:
    return TrainingError(f"--data: {problem}: pip install 'ctc-speculator[data]'")


@dataclass(frozen=True)
class Turn:
    """A user's turn: the conversation up to this turn, and the data's answer, if there is one.

    messages: role and content of each message; the user's turn is the last one
    finished: whether the answer ends where its author ended it
    verbatim: whether the answer follows the prompt to the letter
    where: the turn's place in the data, for error messages
    """

    messages: list[Message]
    answer: str | None
    finished: bool = True
    verbatim: bool = False
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class PlainText:
    """Text that is used without a chat template.

    prompt_length: the number of characters of the prompt; None if the reader decides
    finished: whether the text ends where its author ended it
    where: the text's place in the data, for error messages
    """

    text: str
    prompt_length: int | None = None
    finished: bool = False
    where: str = field(default="", compare=False)


def read_turns(path: Path, bad: BadRows | None = None) -> list[Turn | PlainText]:
    """All prompts of a data file, as text.

    Raises TrainingError naming file, line and field, for a row that cannot be used unless ``bad`` skips it.
    """
    bad = bad or BadRows()
    num_bad = bad.count
    turns: list[Turn | PlainText] = []
    for where, row in read_rows(path, bad):
        try:
            turns.extend(replace(turn, where=where) for turn in list(_turns(row)))
        except ValueError as error:
            bad.refuse(f"{where}: {error}; got {brief(row)}")
    if not turns:
        refused = "".join(f"; the first bad row: {problem}" for problem in bad.first[num_bad : num_bad + 1])
        raise TrainingError(f"--data: {path} holds no prompt{refused}")
    return turns


def plain_prompt(text: PlainText) -> str:
    """The prompt of a plain text without a tokenizer: the whole words among its first characters."""
    if text.prompt_length is not None:
        return text.text[: text.prompt_length]
    cut = max(1, int(len(text.text) * TEXT_PROMPT_SHARE))
    # The prompt ends with a word, because the space after it belongs to the next token.
    words = re.match(rf".{{1,{cut}}}(?<=\S)(?!\S)", text.text, re.DOTALL)
    return words[0] if words else text.text[:cut]


def _turns(row: Any) -> Iterator[Turn | PlainText]:
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    # A row of a table has every column, and those without a value are null.
    row = {name: value for name, value in row.items() if value is not None}
    reason = row.get("finish_reason")
    if "conversations" in row:
        yield from _user_turns(row["conversations"], "conversations", SHAREGPT, row)
    elif "messages" in row:
        yield from _user_turns(row["messages"], "messages", OPENAI, row)
    elif "turns" in row:
        yield from (Turn([_user(text, "turns")], None) for text in _list(row["turns"], "turns")[:1])
    elif isinstance(row.get("prompt"), list):
        yield _conversational(row["prompt"], row.get("completion"), reason)
    elif "prompt" in row or "question" in row:
        question, answer = ("prompt", "completion") if "prompt" in row else ("question", "answer")
        message = _user(row[question], question)
        follows = _text(row[answer], answer) if answer in row else None
        if row.get("raw") is True:
            prompt = message["content"]
            yield PlainText(prompt + (follows or ""), len(prompt), reason == "stop")
        else:
            yield Turn([message], follows, reason in ENDED)
    elif "instruction" in row:
        text = _text(row["instruction"], "instruction")
        further = _text(row.get("input", ""), "input")
        follows = _text(row["output"], "output") if "output" in row else None
        message = _user(f"{text}\n\n{further}" if further else text, "instruction")
        yield Turn([message], follows, reason in ENDED)
    elif "text" in row:
        yield PlainText(_text(row["text"], "text"))
    else:
        raise ValueError(f"expected a field {FORMS}")


def _user_turns(entries: Any, field: str, form: Form, row: dict[str, Any]) -> Iterator[Turn]:
    """A turn for every user's message whose answer is more than history."""
    entries = _list(entries, field)
    messages = [_message(entry, form) for entry in entries]
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        follows = messages[index + 1 : index + 2]
        answer = follows[0]["content"] if follows and follows[0]["role"] == "assistant" else None
        if answer is not None and entries[index + 1].get("weight") == 0:
            continue
        last = index + 2 == len(messages)
        finished = not last or row.get("finish_reason") in ENDED
        yield Turn(messages[: index + 1], answer, finished, last and row.get("verbatim") is True)


def _conversational(prompt: list[Any], completion: Any, reason: Any) -> Turn:
    """A prompt of messages and, if there is one, a completion that begins with the assistant's message."""
    messages = [_message(entry, OPENAI) for entry in prompt]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("field 'prompt': expected messages of which the user's is the last")
    answers = [_message(entry, OPENAI) for entry in _list(completion or [], "completion")]
    if answers and answers[0]["role"] != "assistant":
        raise ValueError("field 'completion': expected an assistant's message first")
    last = len(answers) == 1
    return Turn(messages, answers[0]["content"] if answers else None, not last or reason in ENDED)


def chat_text(messages: list[Message], tokenizer: Any, **options: Any) -> str:
    """A conversation in a tokenizer's chat template, the same on every day. Raises what the template raises.

    options: of ``apply_chat_template``
    """
    # Transformers hands a template no function, so what it calls is replaced by its result.
    template = TODAY.sub(
        lambda call: json.dumps(TEMPLATE_DATE.strftime(call[2])), tokenizer.get_chat_template()
    )
    text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return text


def encode_rendered(text: str, tokenizer: Any) -> list[int]:
    """Text that a chat template has rendered: it has its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_messages(messages: list[Message]) -> str:
    """A conversation as plain text, for a model without a chat template."""
    return "\n".join(message["content"] for message in messages)


def _message(entry: Any, form: Form) -> Message:
    role, text = read_role(entry, form), read_content(entry, form)
    return {"role": role, "content": _text(text, form.content)}


def _user(value: Any, field: str) -> Message:
    return {"role": "user", "content": _text(value, field)}


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"field {field!r}: expected a list, got {type(value).__name__}")
    return list(value)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {field!r}: expected text, got {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can hold a lone surrogate, but tokenizers and servers refuse it.
        raise ValueError(f"field {field!r}: holds a lone surrogate at {error.start}") from None
    return value

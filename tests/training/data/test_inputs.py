"""Where training data and models come from: kinds of files, rows that are skipped, names of the hub."""

import fnmatch
import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from drafters.model_files import check_model_files, is_hub_name, local_model
from drafters.target_models import TargetModelError
from training.data.conversations import BadRows, PlainText, Turn, read_turns
from training.settings import TrainingError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
ONE_TURN = [Turn([USER], "hello")]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"instruction": "hi", "output": "hello"},
        {"instruction": "hi", "input": "", "output": "hello", "text": "Below is an instruction ..."},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ASSISTANT]},
        {"prompt": "hi", "completion": "hello"},
        {"instruction": "hi", "input": None, "output": "hello", "finish_reason": None},
        {"messages": None, "prompt": "hi", "completion": "hello", "finish_reason": "stop"},
    ],
)
def test_formats_agree(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read_turns(write(tmp_path / "a.jsonl", row)) == ONE_TURN


def test_parts_instructions_and_prompts_of_messages(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    system = {"role": "developer", "content": "be brief"}
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": ""},
        {"prompt": [system, {"role": "user", "content": parts}]},
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT], "finish_reason": "length"},
    ]
    assert read_turns(write(tmp_path / "a.jsonl", *rows)) == [
        Turn([{"role": "user", "content": "Add.\n\n1 and 2"}], ""),
        Turn([{"role": "system", "content": "be brief"}, USER], None),
        Turn([USER, ASSISTANT, USER], "hello", finished=False),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": ["hi"]}, "'instruction': expected text, got list"),
        ({"instruction": "hi", "input": 3}, "'input': expected text, got int"),
        ({"prompt": []}, "'prompt': expected messages of which the user's is the last"),
        ({"prompt": [USER, ASSISTANT]}, "'prompt': expected messages of which the user's is the last"),
        ({"prompt": [USER], "completion": [USER]}, "'completion': expected an assistant's message first"),
        ({"prompt": [USER], "completion": "hello"}, "'completion': expected a list, got str"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "'content': expected parts of the type 'text', got 'image_url'",
        ),
        ({"messages": [{"role": "tool", "content": "42"}]}, "'role': expected one of human, .*got 'tool'"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(TrainingError, match=rf"a\.jsonl:2: .*{message}"):
        read_turns(path)


def test_gzip_and_a_truncated_one(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}, {"text": "word"})
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_turns(packed) == read_turns(plain) == [*ONE_TURN, PlainText("word")]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(TrainingError, match=r"a\.jsonl\.gz is no gzip file, or not a whole one"):
        read_turns(packed)
    packed.write_bytes(plain.read_bytes())
    with pytest.raises(TrainingError, match=r"a\.jsonl\.gz is no gzip file"):
        read_turns(packed)


def test_parquet_equals_json(tmp_path: Path) -> None:
    """A table has every column in every row; those without a value are left out."""
    pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    rows: list[dict[str, Any]] = [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "a", "completion": "b"},
        {"prompt": "c"},
    ]
    names = {name for row in rows for name in row}
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    parquet.write_table(table, tmp_path / "a.parquet")
    found = read_turns(tmp_path / "a.parquet")
    assert found == [*ONE_TURN, *read_turns(write(tmp_path / "a.jsonl", *rows[1:]))]
    assert [turn.where for turn in found] == [f"{tmp_path}/a.parquet[{row}]" for row in range(3)]


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        TrainingError, match=r"needs the package pyarrow: pip install 'ctc-speculator\[data\]'"
    ):
        read_turns(tmp_path / "a.parquet")


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if split == "none":
            raise ValueError("Unknown split\nand more")
        return [{"messages": [USER, ASSISTANT], "prompt": None}]

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_turns(Path("some/chats")) == ONE_TURN
    assert read_turns(Path("some/chats:train_sft[:10%]")) == ONE_TURN
    assert asked == [("some/chats", "train"), ("some/chats", "train_sft[:10%]")]
    with pytest.raises(
        TrainingError, match=r"the split 'none' of the data set some/chats .*: Unknown split$"
    ):
        read_turns(Path("some/chats:none"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainingError, match=r"some/chats is no file; .* needs the package datasets"):
        read_turns(Path("some/chats"))


def test_bad_rows_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"prompt": 1}, {}, {"text": 2}, {"turns": "x"}, {"prompt": "two"}]
    path = write(tmp_path / "a.jsonl", *rows)
    path.write_text(path.read_text() + "{\n")
    bad = BadRows(skip=True)
    texts = [turn.messages[0]["content"] for turn in read_turns(path, bad) if isinstance(turn, Turn)]
    assert texts == ["one", "two"]
    assert bad.count == 5
    assert [problem.split(": ")[0] for problem in bad.first] == [f"{path}:{line}" for line in (2, 3, 4)]


def test_where_all_rows_are_bad_the_first_is_named(tmp_path: Path) -> None:
    path, more = write(tmp_path / "a.jsonl", {"prompt": 1}, {}), write(tmp_path / "b.jsonl", {"text": 2})
    bad = BadRows(skip=True)
    for file, row in ((path, "a.jsonl:1: field 'prompt'"), (more, "b.jsonl:1: field 'text'")):
        with pytest.raises(
            TrainingError, match=f"holds no prompt; the first bad row: .*{row}: expected text"
        ):
            read_turns(file, bad)


class Hub:
    """Stands in for the hub's client: a directory with repositories."""

    def __init__(self, root: Path):
        self.root = root
        self.fetched: list[str] = []

    def hf_hub_download(self, repository: str, name: str) -> str:
        return self._found(repository, name)

    def snapshot_download(self, repository: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        assert "*.safetensors" in allow_patterns
        assert fnmatch.fnmatch("consolidated.safetensors", ignore_patterns)
        return self._found(repository, "")

    def _found(self, repository: str, name: str) -> str:
        self.fetched.append(f"{repository}/{name}")
        path = self.root / repository / name
        if not path.exists():
            raise OSError(f"404 Client Error: {repository}\nmore lines")
        return str(path)


def test_models_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (tmp_path / "some/model").mkdir(parents=True)
    (tmp_path / "some/model/config.json").write_text('{"model_type": "qwen3"}')
    check_model_files(Path("some/model"))
    assert local_model(Path("some/model")) == tmp_path / "some/model"
    assert hub.fetched == ["some/model/config.json", "some/model/"]
    with pytest.raises(
        TargetModelError, match=r"^some/other is no directory here, .*404 Client Error: some/other$"
    ):
        check_model_files(Path("some/other"))


def test_paths_of_this_machine_are_no_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/model").mkdir(parents=True)
    assert is_hub_name(Path("some/model"))
    for path in ("build/model", "build/absent", "model", "/some/model", "a/b/c", "../some"):
        assert not is_hub_name(Path(path)), path
    assert local_model(Path("build/model")) == Path("build/model")

"""Prompts that are made for a question: copying ones, and the same questions after longer conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import copying_prompts, long_conversations
from runtime.core.prompts import read_prompts
from runtime.decoder import SpeculativeDecoder

WORDS = "word " * 100
MARKDOWN = f"""# Title

{WORDS}end.

Too short.

- {WORDS}a list

| {WORDS} | a table |

```
{WORDS}code
```

First half {"one " * 50}

and second half {"two " * 50}
"""
CODE = "def short():\n    pass\n\n\ndef long(a):\n" + "    a += 1\n" * 9 + "    return a\n"


def test_passages_and_functions_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(copying_prompts.passages(MARKDOWN))
    assert [text.split()[0] for text in found] == ["word", "First"]
    assert found[1].count("\n\n") == 1
    assert [text[:8] for text in copying_prompts.functions(CODE)] == ["def long"]
    (tmp_path / "a.md").write_text(MARKDOWN)
    (tmp_path / "b.py").write_text(CODE)
    argv = ["--documents", str(tmp_path / "a.md"), str(tmp_path / "b.py"), "--out", str(tmp_path / "out")]
    assert copying_prompts.main([*argv, "--count", "3"]) == 0
    prompts = read_prompts(tmp_path / "out" / "copying.jsonl")
    assert [found[0] in prompts[0].text, found[1] in prompts[1].text] == [True, True]
    assert "```python\ndef long(a):" in prompts[2].text
    assert copying_prompts.main([*argv[:-1], str(tmp_path / "more"), "--count", "4"]) == 2
    assert "--documents: expected 4 passages and functions (--count), got 3" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_the_same_questions_after_longer_conversations(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"how many? {index}"}) + "\n" for index in range(12)))
    base = ["--bundle", str(tiny_bundle_dir), "--threads", "1", "--answer-tokens", "10", "--count", "2"]
    argv = [*base, "--prompts", str(path), "--out", str(tmp_path / "out")]
    assert long_conversations.main([*argv, "--lengths", "60,160"]) == 0
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1)
    questions: list[list[str]] = []
    for length in (60, 160):
        conversations = read_prompts(tmp_path / "out" / f"{length}.jsonl")
        sizes = [len(decoder.prompt_tokenizer.encode_messages(each.messages)) for each in conversations]
        assert length / 2 < min(sizes)
        assert max(sizes) <= length
        questions.append([each.text for each in conversations])
        roles: Any = [message["role"] for message in conversations[0].messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert questions[0] == questions[1]
    for lengths, message in (
        ("600", "--lengths: must be less than 512, got 600"),
        ("3", "--lengths: 3 is less than a question alone has"),
        ("500", "--prompts: all questions and answers have less than 500 tokens; give more files"),
    ):
        assert long_conversations.main([*argv[:-1], str(tmp_path / "no"), "--lengths", lengths]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()

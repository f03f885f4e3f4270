"""Scores of lm-eval through the server and through Transformers.

    LM_EVAL=ENVIRONMENT/bin/lm_eval python -m pytest tests/triton_repo/openai/test_lm_eval.py

lm-eval needs numpy 2, so it has an environment of its own, with ``lm-eval[api]``, torch and transformers.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.triton_repo.servers import Server
from triton_repo.triton.tensors import MODEL

LM_EVAL = os.environ.get("LM_EVAL", "")
pytestmark = pytest.mark.skipif(not LM_EVAL, reason="LM_EVAL does not name lm-eval's command")
QUESTIONS = [
    f"What are {first} and {second}?" for first in ("one", "two") for second in ("ten", "a day", "blue")
]
CHOICES = [" one", " two days", " a blue one"]
SHARED = {"dataset_path": "json", "test_split": "train"}
TASKS: dict[str, dict[str, Any]] = {
    "likelihood": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nA:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of lm-eval's tasks."""
    directory = tmp_path_factory.mktemp("tasks")
    rows = [{"question": text, "choices": CHOICES, "label": at % 3} for at, text in enumerate(QUESTIONS)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {"dataset_kwargs": {"data_files": str(directory / "rows.jsonl")}}
    for name, task in TASKS.items():
        # JSON is YAML.
        text = json.dumps({"task": name, **SHARED, **files, **task})
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def server(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny_bundle_dir, tmp_path_factory.mktemp("server") / "log", "--server", "own")
    yield running
    assert running.stop() == 0


def samples(tasks: Path, out: Path, task: str, *arguments: str) -> list[dict[str, Any]]:
    """What lm-eval asked and got, in the order of the documents."""
    command = [LM_EVAL, *arguments, "--include_path", str(tasks), "--tasks", task]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks / "cache")}
    environment.pop("PYTHONPATH", None)
    found = subprocess.run(
        [*command, "--output_path", str(out), "--log_samples"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


@pytest.mark.parametrize(
    ("task", "interface", "flags"),
    [
        ("likelihood", "completions", []),
        ("generation", "completions", []),
        ("generation", "chat/completions", ["--apply_chat_template"]),
    ],
)
def test_the_score_is_that_of_transformers(
    server: Server,
    tasks: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    task: str,
    interface: str,
    flags: list[str],
) -> None:
    kind = f"local-{interface.replace('/', '-')}"
    address = f"base_url=http://localhost:{server.openai_port}/v1/{interface}"
    options = f"model={MODEL},{address},tokenizer={tiny_model_dir},tokenizer_backend=huggingface"
    if flags:
        options = f"model={MODEL},{address}"
    asked = samples(tasks, tmp_path / "server", task, "--model", kind, "--model_args", options, *flags)
    local = f"pretrained={tiny_model_dir},dtype=float32"
    arguments = ("--model", "hf", "--model_args", local, "--device", "cpu", *flags)
    expected = samples(tasks, tmp_path / "transformers", task, *arguments)
    assert len(asked) == len(expected) == len(QUESTIONS)
    for ours, theirs in zip(asked, expected, strict=True):
        if task == "generation":
            assert ours["resps"] == theirs["resps"]
            assert ours["exact_match"] == theirs["exact_match"]
        else:
            scores = [[float(answer[0][0]) for answer in each["resps"]] for each in (ours, theirs)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-3)
            assert ours["acc"] == theirs["acc"]

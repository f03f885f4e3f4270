"""Self-distillation against one prompt at a time, and its cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from training.data import sequences as sequences_module
from training.data.sequences import Example, Sequences, distill
from training.target_model import fingerprint

NEW_TOKENS = 12
# Two best logits this close may change places when prompts are padded.
TIE = 1e-4
# So many that a random model says one of them within a few tokens.
EOS_IDS = list(range(0, 250, 10))


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture
def examples() -> list[Example]:
    """Prompts of 1 to 17 tokens, neither sorted by length nor all different."""
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 1, 17, 4, 4, 12, 2, 9, 1, 6]
    rows = [torch.randint(2, 250, (length,), generator=generator).tolist() for length in lengths]
    return [Example(row, None) for row in [*rows, rows[0]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The batches of prompts that were really generated for."""
    seen: list[list[list[int]]] = []
    real = sequences_module.continue_prompts

    def generate(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        seen.append(prompts)
        return real(model, prompts, **options)

    monkeypatch.setattr(sequences_module, "continue_prompts", generate)
    return seen


def run(model: Any, examples: list[Example], cache_dir: Path, **changed: Any) -> Sequences:
    options: dict[str, Any] = {
        "model_fingerprint": "tiny",
        "cache_dir": cache_dir,
        "max_new_tokens": NEW_TOKENS,
        "batch_size": 4,
        "eos_token_ids": EOS_IDS,
    }
    return distill(model, examples, **(options | changed))


def rows(sequences: Sequences) -> list[tuple[int, list[int]]]:
    return [(int(sequences.prompt_lengths[i]), sequences[i].tolist()) for i in range(len(sequences))]


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], answer: list[int], eos: list[int], max_new: int) -> None:
    """``answer`` is what the model says token by token, without padding or cache; ties may differ."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    for step, token in enumerate(answer):
        at = logits[len(prompt) - 1 + step]
        assert at.max() - at[token] <= TIE
        assert (token in eos) == (step == len(answer) - 1) or len(answer) == max_new
    assert not set(answer[:-1]) & set(eos)


def test_distilled_text_is_greedy(model: Any, examples: list[Example], tmp_path: Path) -> None:
    sequences = run(model, examples, tmp_path)
    assert len(sequences) == len(examples)
    for example, (length, tokens) in zip(examples, rows(sequences), strict=True):
        assert tokens[:length] == example.prompt_ids
        assert_greedy(model, example.prompt_ids, tokens[length:], EOS_IDS, NEW_TOKENS)
    lengths = [len(tokens) - length for length, tokens in rows(sequences)]
    assert min(lengths) < NEW_TOKENS == max(lengths)  # some were cut at an end-of-text token


def test_distilled_text_equals_generate(model: Any, examples: list[Example], tmp_path: Path) -> None:
    """Hugging Face's generate, one prompt at a time: no padding, no end-of-text token."""
    sequences = run(model, examples, tmp_path, eos_token_ids=[])
    for example, (length, tokens) in zip(examples, rows(sequences), strict=True):
        expected = model.generate(
            input_ids=torch.tensor([example.prompt_ids]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        if tokens != expected[0].tolist():  # only where two tokens tie
            assert_greedy(model, tokens[:length], tokens[length:], [], NEW_TOKENS)
        assert len(tokens) == length + NEW_TOKENS


def test_generation_settings_of_the_model_do_not_matter(
    tiny_model_dir: Path, examples: list[Example], tmp_path: Path
) -> None:
    """Instruction models ship a repetition penalty and sampling; drafts are verified without them."""
    own = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    expected = rows(run(own, examples, tmp_path / "a"))
    bent = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    bent.generation_config.update(
        repetition_penalty=3.0, do_sample=True, temperature=2.0, no_repeat_ngram_size=1, min_new_tokens=5
    )
    assert rows(run(bent, examples, tmp_path / "b")) == expected


def test_answers_are_cut_after_the_first_end_of_text(tmp_path: Path, model: Any) -> None:
    prompt = [7, 8, 9]
    free = rows(run(model, [Example(prompt, None)], tmp_path, eos_token_ids=[]))[0][1][3:]
    stops = [free[4], free[2]]
    cut = rows(run(model, [Example(prompt, None)], tmp_path, eos_token_ids=stops))[0][1][3:]
    assert cut == free[: min(free.index(token) for token in stops) + 1]


def test_the_cache_answers_without_the_model(
    model: Any, examples: list[Example], tmp_path: Path, calls: list[list[list[int]]]
) -> None:
    first = rows(run(model, examples, tmp_path))
    assert sum(map(len, calls)) == len(examples)
    calls.clear()
    assert rows(run(None, examples, tmp_path)) == first
    assert calls == []


@pytest.mark.parametrize("change", ["prompt", "max_new_tokens", "model", "eos", "order"])
def test_what_the_text_depends_on_changes_the_cache(
    model: Any, examples: list[Example], tmp_path: Path, calls: list[list[list[int]]], change: str
) -> None:
    examples = examples[:2]
    run(model, examples, tmp_path)
    calls.clear()
    options: dict[str, dict[str, Any]] = {
        "max_new_tokens": {"max_new_tokens": NEW_TOKENS - 1},
        "model": {"model_fingerprint": "other"},
        "eos": {"eos_token_ids": EOS_IDS[1:]},
    }
    if change == "prompt":
        examples = [examples[0], Example([*examples[1].prompt_ids, 5], None)]
    elif change == "order":
        examples = examples[::-1]
    found = rows(run(model, examples, tmp_path, **options.get(change, {})))
    assert calls
    assert [tokens[:length] for length, tokens in found] == [e.prompt_ids for e in examples]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupted_run_continues(
    model: Any,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[list[list[int]]],
) -> None:
    expected = rows(run(model, examples, tmp_path / "whole"))
    counted, batches = sequences_module.continue_prompts, 0

    def interrupted(*arguments: Any, **options: Any) -> list[list[int]]:
        nonlocal batches
        batches += 1
        if batches == 4:
            raise KeyboardInterrupt
        return counted(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sequences_module, "continue_prompts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, examples, tmp_path / "parts", batch_size=2)
    calls.clear()
    assert rows(run(model, examples, tmp_path / "parts", batch_size=2)) == expected
    lengths = sorted(len(e.prompt_ids) for e in examples)
    assert [len(prompt) for batch in calls for prompt in batch] == lengths[6:]
    (path,) = (tmp_path / "parts").iterdir()
    _, *batches_kept = map(json.loads, path.read_text().splitlines())
    assert [len(batch["answers"]) for batch in batches_kept] == [2, 2, 2, 2, 2, 1]


def test_fingerprint_covers_weights_and_configuration(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model-1.safetensors": b"abc", "model-2.safetensors": b"def"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "README.md").write_text("not part of it")
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("changed")
    assert fingerprint(tmp_path) == before
    for name, content in files.items():
        (tmp_path / name).write_bytes(content + b"x")
        assert fingerprint(tmp_path) != before
        (tmp_path / name).write_bytes(content)
    assert fingerprint(tmp_path) == before


def test_the_bar_moves_with_every_token_and_every_end(
    model: Any, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token on; a prompt counts when it ends, and in the end every one has been counted."""
    seen: list[tuple[int, int]] = []
    real = sequences_module._show

    def show(bar: Any, begun: int, num_tokens: int, num_ended: int) -> None:
        real(bar, begun, num_tokens, num_ended)
        seen.append((bar.n, num_tokens))

    monkeypatch.setattr(sequences_module, "_show", show)
    found = run(model, examples[:4], tmp_path, batch_size=4)
    lengths = sorted(len(found[i]) - found.prompt_lengths[i] for i in range(4))
    assert lengths[0] < lengths[-1] <= NEW_TOKENS, "the example must have answers of several lengths"
    steps = range(1, lengths[-1] + 1)
    tokens = [sum(min(step, length) for length in lengths) for step in steps]
    assert [count for _, count in seen[:-1]] == tokens
    ended = [sum(length <= step and step < NEW_TOKENS for length in lengths) for step in steps]
    assert [done for done, _ in seen[:-1]][: lengths[0]] == ended[: lengths[0]]
    assert seen[-1] == (4, sum(lengths))

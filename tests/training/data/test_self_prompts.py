"""Prompts that a model writes itself: the template around them, the filter, the store, the generation."""

import dataclasses
import datetime
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import chat_template_utils

from runtime.core.errors import UserError
from tests.training.data_files import read_examples
from training import distill, target_model, train
from training.data import sequences
from training.data.conversations import read_turns
from training.data.self_prompts import (
    SelfPrompts,
    UserTemplate,
    count_near_duplicates,
    local_draw,
    script,
    self_prompts_record,
    write_self_prompts,
)
from training.data.sequences import encode_messages
from training.settings import DistillConfig, TrainingError
from training.target_model import continue_prompts, nucleus_sampler

SETTINGS = DistillConfig(
    model="tiny",
    out=Path("answers.jsonl"),
    self_prompts=12,
    prompt_temperature=1.0,
    prompt_top_p=0.95,
    max_prompt_tokens=12,
    seed=0,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_continuations_equal_generate(model: Any) -> None:
    """Prompts of several lengths, of which some end early, against Transformers one by one."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 250, (n,), generator=generator).tolist() for n in (5, 1, 9, 3, 5, 7)]
    ends = list(range(0, 250, 9))
    seen: list[tuple[int, int]] = []
    found = continue_prompts(
        model, prompts, max_new_tokens=10, end_token_ids=ends, progress=lambda *now: seen.append(now)
    )
    for prompt, tokens in zip(prompts, found, strict=True):
        config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=ends, pad_token_id=0)
        whole = model.generate(torch.tensor([prompt]), generation_config=config)[0].tolist()
        assert tokens == whole[len(prompt) :]
    assert len({len(tokens) for tokens in found}) > 2
    assert seen[-1][0] == sum(map(len, found))
    assert seen[-1][1] == sum(tokens[-1] in ends for tokens in found)


def test_sampling_draws_from_the_nucleus() -> None:
    """Frequencies are the nucleus's own, with one token beyond the share that fills it and none after."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = probs.log().expand(20000, 5)
    drawn = nucleus_sampler(1.0, 0.8, 0, CPU)(logits)
    counts = torch.bincount(drawn, minlength=5) / 20000
    assert torch.allclose(counts, torch.tensor([0.5, 0.25, 0.15, 0, 0]) / 0.9, atol=0.015)
    hot = nucleus_sampler(2.0, 1.0, 0, CPU)(logits)
    assert torch.allclose(
        torch.bincount(hot, minlength=5) / 20000, (probs.sqrt() / probs.sqrt().sum()), atol=0.015
    )


@pytest.mark.parametrize(
    ("template", "prefix", "suffix", "end_text"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>",
        ),
        (
            "<s>{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
            "<s>[INST] ",
            " [/INST]",
            "[/INST]",
        ),
        (
            "A chat. {% for m in messages %}USER: {{ m.content }} {% endfor %}ASSISTANT:",
            "A chat. USER: ",
            " ASSISTANT:",
            "ASSISTANT:",
        ),
    ],
)
def test_what_a_template_writes_around_a_user(
    tokenizer: Any, template: str, prefix: str, suffix: str, end_text: str
) -> None:
    tokenizer.chat_template = template
    found = UserTemplate.of(tokenizer)
    assert (found.prefix, found.suffix, found.end_text) == (prefix, suffix, end_text)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        ("{{ messages[0].content }}{{ messages[0].content }}!", "a user's message 2 times"),
        ("nothing", "a user's message 0 times"),
        ("{{ messages[0].content }}", "writes nothing behind a user's message"),
        ("{{ raise_exception('only systems') }}", "refuses a user's message: only systems"),
    ],
)
def test_templates_without_users(tokenizer: Any, template: str | None, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TrainingError, match=f"^--self-prompts: .*{message}"):
        UserTemplate.of(tokenizer)


def test_system_messages_take_turns(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    settings = dataclasses.replace(SETTINGS, prompt_systems=("Write code.", "Tell a story."))
    monkeypatch.setattr(SelfPrompts, "problem", lambda self, text, finished: None)
    prefixes = []

    def draw(templates: Sequence[UserTemplate], seed: int, missing: int) -> list[tuple[str, bool]]:
        prefixes.append([template.prefix for template in templates])
        return [("Some text", True)] * 5

    def write_to_file(settings: DistillConfig) -> None:
        record = self_prompts_record(settings, tokenizer, model_name="tiny", seed=0)
        assert settings.self_prompts is not None
        write_self_prompts(
            draw, SelfPrompts(tmp_path / "p.jsonl", record, [], flag="--out"), settings.self_prompts
        )

    for count in (7, 16):
        write_to_file(dataclasses.replace(settings, self_prompts=count))
    code, story = "system: Write code. user: ", "system: Tell a story. user: "
    # The second and third draws go on where the one before ended.
    assert prefixes == [[code, story], [story, code], [code, story], [story, code]]
    with pytest.raises(UserError, match="was written with other settings"):
        write_to_file(SETTINGS)


def test_a_batch_has_all_system_messages(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    settings = dataclasses.replace(SETTINGS, prompt_systems=("Write code.", "Tell a story."))
    seen: list[str] = []

    def watched(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        seen.extend(tokenizer.decode(prompt) for prompt in prompts)
        return real(model, prompts, **options)

    real = target_model.continue_prompts
    monkeypatch.setattr(target_model, "continue_prompts", watched)
    templates = UserTemplate.all_of(tokenizer, settings)
    draw = local_draw(model, tokenizer, settings, end_token_ids=[0], batch_size=3)
    assert len(draw(templates, 0, 3)) == 3
    assert seen == [templates[index].prefix for index in (0, 1, 0)]


def test_a_template_with_the_date_writes_the_same_every_day(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3.2's and SmolLM3's do. Prompts and continuations of yesterday have to be found today."""
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "Today: {{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}",
    )
    message = [{"role": "user", "content": "hi"}]

    def written() -> tuple[str, list[int]]:
        return UserTemplate.of(tokenizer).prefix, encode_messages(message, tokenizer)

    today = written()

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Tomorrow":
            return cls(2031, 2, 3)

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    assert written() == today


def test_a_template_without_system_messages(tokenizer: Any) -> None:
    tokenizer.chat_template = "Q: {{ messages[-1].content }} A:"
    with pytest.raises(TrainingError, match=r"^--prompt-systems: the chat template does not write"):
        UserTemplate.of(tokenizer, "Write code.")


def test_what_is_left_out(tmp_path: Path) -> None:
    check = SelfPrompts(tmp_path / "p.jsonl", {}, ["<|im_end|>", ""], flag="--out")
    assert check.problem("Can you name 3 rivers in Peru?", finished=True) is None
    for text, problem in (
        ("can you name 5 rivers, in Peru", "duplicate"),
        ("What is <|im_end|> for?", "holds a special token"),
        ("What is \ufffd?? Tell me please", "broken characters"),
        ("What is\x00 this thing here", "broken characters"),
        ("1 + 1 = ?", "too short"),
        ("name the rivers. " * 30, "repeats itself"),
        ("say " + "a" * 50, "no words"),
    ):
        assert check.problem(text, finished=True) == problem
    assert check.problem("Can you name lakes in Peru?", finished=False) == "unfinished"
    assert check.problem("Как называется столица Перу?", finished=True) is None
    assert check.problem("请告诉我秘鲁的首都是哪里呢?", finished=True) is None


def test_scripts() -> None:
    assert [script(text) for text in ("Abc д", "Привет x", "漢字かな漢", "12")] == [
        "Latin",
        "Cyrillic",
        "Cjk",
        "None",
    ]


def write(model: Any, tokenizer: Any, path: Path, model_name: str = "tiny") -> SelfPrompts:
    draw = local_draw(model, tokenizer, SETTINGS, end_token_ids=[0], batch_size=8)
    record = self_prompts_record(SETTINGS, tokenizer, model_name=model_name, seed=0)
    prompts = SelfPrompts(path, record, tokenizer.all_special_tokens, flag="--out")
    write_self_prompts(draw, prompts, 12)
    return prompts


def test_an_interrupted_run_continues(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the prompts of a run that was not interrupted, and writes none of them twice."""
    # A random model's words are of no use, so all are taken.
    monkeypatch.setattr(SelfPrompts, "problem", lambda self, text, finished: None)
    expected = write(model, tokenizer, tmp_path / "whole.jsonl")
    assert len(expected.texts) == 16
    assert expected.drawn == 16
    assert len(set(expected.texts)) > 12
    real, calls = target_model.continue_prompts, 0

    def interrupted(*arguments: Any, **options: Any) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(target_model, "continue_prompts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(model, tokenizer, tmp_path / "parts.jsonl")
    assert write(model, tokenizer, tmp_path / "parts.jsonl").texts == expected.texts
    assert calls == 3
    assert write(model, tokenizer, tmp_path / "parts.jsonl").texts == expected.texts
    assert calls == 3
    with pytest.raises(UserError, match=r"^--out: .*was written with other settings \(model: 'tiny', not 'o"):
        write(model, tokenizer, tmp_path / "parts.jsonl", model_name="other")


def test_a_model_that_writes_nothing_of_use(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfPrompts, "problem", lambda self, text, finished: "too short")
    monkeypatch.setattr("training.data.self_prompts.MAX_USELESS_IN_A_ROW", 16)
    with pytest.raises(
        TrainingError, match=r"of the last 16 prompts that the model wrote none is of use \(too"
    ):
        write(model, tokenizer, tmp_path / "p.jsonl")


def test_the_report_counts_what_was_left_out(tmp_path: Path) -> None:
    prompts = SelfPrompts(tmp_path / "p.jsonl", {}, [], flag="--out")
    added = prompts.add(
        ["Where does the river end?", "Where does the river end?", "What"], [True, True, False]
    )
    assert added == 1
    assert prompts.left_out == Counter({"duplicate": 1, "unfinished": 1})
    assert prompts.report()[0] == (
        "1 of 3 prompts that the model wrote as a user are kept; left out: 1 duplicate, 1 unfinished"
    )


def test_near_duplicates_are_those_of_all_pairs() -> None:
    """The filter by rare triples finds what a comparison of all pairs finds."""
    rng = np.random.default_rng(0)
    words = [f"w{letter}" for letter in "abcdefgh"]
    texts = [" ".join(rng.choice(words, 12)) for _ in range(60)]
    texts += (
        [text + " wz" for text in texts[:9]] + [text.replace("wa", "wb") for text in texts[9:30]] + ["one"]
    )

    def triples(text: str) -> set[str]:
        return {text[start : start + 8] for start in range(0, max(len(text) - 7, 1), 3)}

    def is_near(a: set[str], b: set[str]) -> bool:
        return len(a & b) >= 0.7 * len(a | b)

    sets = [triples(text) for text in texts]
    expected = sum(any(is_near(each, other) for other in sets[:index]) for index, each in enumerate(sets))
    assert count_near_duplicates(texts) == expected
    assert 9 <= expected < 31


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's words are of no use, so all that differ are taken."""

    def problem(self: Any, text: str, *, finished: bool) -> str | None:
        if text in self._seen or not text:
            return "duplicate"
        self._seen.add(text)
        return None

    monkeypatch.setattr(SelfPrompts, "problem", problem)


def test_training_sees_the_tokens_that_the_model_wrote(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the space before them, which the template writes as well; and no half character at their end."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    written = [tokenizer.encode(text) for text in (" yes", "  two ", "no", "caf\u00e9")]
    written[3].pop()  # half of the last character: the tokenizer knows bytes
    monkeypatch.setattr(sequences, "continue_prompts", lambda model, prompts, **options: written)
    data, out = tmp_path / "data.jsonl", tmp_path / "distilled.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    argv = ["--model", str(tiny_model_dir), "--data", str(data), "--out", str(out), "--max-new-tokens", "9"]
    assert distill.main(argv) == 0
    examples = read_examples(out, tokenizer)
    assert [example.answer_ids for example in examples[:3]] == written[:3]
    assert examples[3].answer_ids == tokenizer.encode("caf")


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The model has 512 positions. Its tokenizer knows bytes, and the template adds some."""
    asked: list[int] = []
    answer = sequences.continue_prompts

    def noting(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        asked.extend(map(len, prompts))
        return answer(model, prompts, **options)

    monkeypatch.setattr(sequences, "continue_prompts", noting)
    data, out = tmp_path / "data.jsonl", tmp_path / "distilled.jsonl"
    # The tokens of a prompt beside its letters.
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    rest = len(encode_messages([{"role": "user", "content": "x"}], tokenizer)) - 1
    lengths = (3, 502 - rest, 503 - rest)
    data.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in lengths))
    argv = ["--model", str(tiny_model_dir), "--data", str(data), "--out", str(out), "--max-new-tokens"]
    assert distill.main([*argv, "10"]) == 1
    seen = capsys.readouterr()
    assert "distill: left out 1 of 3 prompts, which are longer than 502 tokens" in seen.err
    assert "2 of 3 prompts answered" in seen.out
    assert len(asked) == 2
    assert distill.main([*argv[:-2], str(tmp_path / "b.jsonl"), argv[-1], "512"]) == 2
    assert (
        "--max-new-tokens: must be below the model's context of 512 tokens, got 512"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("has_instructions", [False, True])
def test_distill_loads_bf16_where_the_device_multiplies_it(
    has_instructions: bool,
    tiny_model_dir: Path,
    tmp_path: Path,
    takes_all: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.data.local_answers.multiplies_bf16", lambda: has_instructions)
    out = tmp_path / "distilled.jsonl"
    argv = ["--model", str(tiny_model_dir), "--self-prompts", "1", "--out", str(out), "--max-new-tokens", "2"]
    assert distill.main(argv) == 0
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert row["model"].endswith(" bf16") == has_instructions


def test_distill_needs_nothing_but_the_model(
    tiny_model_dir: Path, tmp_path: Path, takes_all: None, capsys: Any
) -> None:
    """What it writes is what training reads; a second run finds all answers."""
    out = tmp_path / "distilled.jsonl"
    argv = ["--model", str(tiny_model_dir), "--self-prompts", "5", "--out", str(out), "--batch-size", "4"]
    argv += ["--max-new-tokens", "6", "--model-dtype", "fp32"]
    assert distill.main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 5
    (name,) = {row["model"] for row in rows}
    assert name.startswith(f"{tiny_model_dir.name} ")
    printed = capsys.readouterr().out
    assert "prompts that the model wrote as a user are kept" in printed
    assert "of 5 answers" in printed
    turns = read_turns(out)
    assert [turn.messages[0]["content"] for turn in turns] == [r["messages"][0]["content"] for r in rows]  # type: ignore[union-attr]
    before = out.read_bytes()
    assert distill.main(argv) == 0
    assert out.read_bytes() == before
    head = tmp_path / "head"
    options = ["--labels", "data", "--steps", "1", "--max-length", "400"]
    base = ["--model", str(tiny_model_dir), "--out", str(head), "--data", str(out)]
    assert train.main([*base, *options]) == 0


def test_answers_of_another_model_of_this_name_are_refused(
    tiny_model_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    other = tmp_path / "other" / tiny_model_dir.name
    shutil.copytree(tiny_model_dir, other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: -value for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many?"}\n')
    argv = ["--data", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    argv += ["--max-new-tokens", "4"]
    assert distill.main(["--model", str(tiny_model_dir), *argv]) == 0
    assert distill.main(["--model", str(tiny_model_dir), *argv]) == 0
    answered = (tmp_path / "out.jsonl").read_text()
    assert answered.count("\n") == 1
    assert distill.main(["--model", str(other), *argv]) == 2
    assert "was written with other settings (model: " in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == answered


def test_a_conversation_that_the_template_refuses_is_one_line(
    tiny_model_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    """Gemma's and Mistral's refuse a system's message, or two users in a row."""
    strict = tmp_path / "strict"
    shutil.copytree(tiny_model_dir, strict)
    (strict / "model.safetensors").unlink()  # The error comes before the weights are read.
    (strict / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many?"}\n')
    argv = ["--data", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert distill.main(["--model", str(strict), *argv, "--max-new-tokens", "512"]) == 2
    assert "--max-new-tokens: must be below the model's context of 512" in capsys.readouterr().err
    assert distill.main(["--model", str(strict), *argv, "--max-new-tokens", "4"]) == 2
    assert "--data: the chat template refuses a conversation: roles must alternate; got 'How" in (
        capsys.readouterr().err
    )


def test_another_seed_than_the_one_a_file_was_begun_with_is_refused(
    tiny_model_dir: Path, tmp_path: Path, takes_all: None, capsys: Any
) -> None:
    out = tmp_path / "out.jsonl"
    argv = ["--model", str(tiny_model_dir), "--out", str(out), "--self-prompts", "2", "--max-new-tokens", "4"]
    assert distill.main([*argv, "--seed", "3"]) == 0
    written = out.read_text()
    capsys.readouterr()
    assert distill.main([*argv, "--seed", "4"]) == 2
    assert capsys.readouterr().err == (
        f"distill: --seed: {tmp_path}/out.prompts.jsonl was begun with --seed 3, got 4; give --seed 3 to go "
        "on, or another --out to begin anew\n"
    )
    assert distill.main([*argv, "--seed", "3"]) == 0
    assert out.read_text() == written


def test_training_on_self_written_prompts(tiny_model_dir: Path, tmp_path: Path, takes_all: None) -> None:
    base = ["--model", str(tiny_model_dir), "--out", str(tmp_path / "head"), "--self-prompts", "6"]
    assert train.main([*base, "--steps", "1", "--max-new-tokens", "8", "--max-prompt-tokens", "12"]) == 0
    record = json.loads((tmp_path / "head/training.json").read_text())
    assert record["num_sequences"] == 6
    assert record["settings"]["self_prompts"] == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--data: expected files of prompts, or --self-prompts N, got neither"),
        (["--self-prompts", "0"], "--self-prompts: must be at least 1, got 0"),
        (
            ["--self-prompts", "4", "--labels", "data"],
            "--labels data: a prompt that the model wrote has no answer in the data; leave out "
            "--self-prompts or --labels",
        ),
    ],
)
def test_wrong_flags_of_training(more: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert train.main(["--model", "m", "--out", str(tmp_path / "o"), *more]) == 2
    assert capsys.readouterr().err == f"train: {message}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--data: expected files of prompts, or --self-prompts N, got neither"),
        (
            ["--self-prompts", "4", "--base-url", "http://127.0.0.1:1/v1"],
            "--chat-template: --self-prompts with a server needs the directory of the served model, for "
            "its chat template",
        ),
        (
            ["--self-prompts", "4", "--completions"],
            "--completions: --self-prompts gives users' messages, which need a template",
        ),
        (["--self-prompts", "4"], "--model: m has no config.json; expected the directory of a model"),
    ],
)
def test_wrong_flags_of_distill(more: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert distill.main(["--model", "m", "--out", str(tmp_path / "o.jsonl"), *more]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"distill: {message[:40]}")

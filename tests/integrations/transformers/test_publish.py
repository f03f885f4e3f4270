"""A head's directory becomes one that ``generate`` loads by its name."""

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, dynamic_module_utils

import demo
import hf_generate.hub
from integrations.transformers import head as head_module
from integrations.transformers.head import generate_with, head_directory
from integrations.transformers.publish import CARD, SCRIPT, PublishError, main, write_hub_files
from tests.conftest import save_tiny_tokenizer
from tests.integrations.transformers.models import PROMPT, make_head, make_model

HEADS = Path(demo.__file__).parent / "heads"
NAMES: dict[str, Any] = {"repository": "someone/head", "model": "someone/model"}


@pytest.fixture
def model() -> Any:
    return make_model("llama", vocab_size=258)


@pytest.fixture
def directory(model: Any, tmp_path: Path) -> Path:
    make_head(model).save_pretrained(tmp_path / "head")
    record = {"curve": [{"step": 50, "beta": 2.25}, {"step": 100, "beta": 3.5}], "num_sequences": 77}
    (tmp_path / "head" / "training.json").write_text(json.dumps(record))
    return tmp_path / "head"


def test_generate_by_name(
    model: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's own path in place of a name on the hub."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    assert main([str(directory), "--repository", str(directory), "--model", "someone/model"]) == 0
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(torch.tensor([PROMPT]), **options)

    def generate(**more: Any) -> Any:
        more = {"num_nodes": 5, "tree": "chain", "trust_remote_code": True, **options, **more}
        return model.generate(torch.tensor([PROMPT]), custom_generate=str(directory), **more)

    assert torch.equal(generate(), expected)
    (head,) = head_module._heads[model].values()
    assert (head.options.num_nodes, head.options.shape) == (5, "chain")
    assert torch.equal(generate(), expected)
    assert list(head_module._heads[model].values()) == [head]

    save_tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    # Half of the tokens are no characters of their own.
    characters = [str(tokenizer.decode([token])) for token in expected[0, 9:20]]
    stop = next(character for character in characters if character.isascii() and character.isprintable())
    found = generate(stop_strings=[stop], tokenizer=tokenizer)
    plain = model.generate(torch.tensor([PROMPT]), stop_strings=[stop], tokenizer=tokenizer, **options)
    assert torch.equal(found, plain)
    assert found.shape[1] < expected.shape[1]
    settings = GenerationConfig(stop_strings=[stop], **options)
    assert torch.equal(generate(generation_config=settings, tokenizer=tokenizer), plain)
    model.generation_config.stop_strings = [stop]
    assert torch.equal(generate(tokenizer=tokenizer), plain)
    assert torch.equal(generate(generation_config=GenerationConfig(), tokenizer=tokenizer), plain)
    assert settings.stop_strings == model.generation_config.stop_strings == [stop]
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        generate()


def test_a_head_does_not_keep_its_model(directory: Path) -> None:
    model = make_model("llama", vocab_size=258)
    generate_with(str(directory), model, {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 3})
    before = len(head_module._heads)
    del model
    gc.collect()
    assert len(head_module._heads) == before - 1


def test_a_repository_is_downloaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(directory / name)

    monkeypatch.setattr(head_module, "cached_file", download)
    assert head_directory("someone/head") == directory
    assert asked == [("someone/head", "config.json"), ("someone/head", "model.safetensors")]


def test_old_names_stay_for_a_release() -> None:
    assert hf_generate.CTCHead is head_module.SpeculativeHead
    assert hf_generate.hub.generate_with is generate_with


def test_the_card(directory: Path) -> None:
    assert write_hub_files(directory, **NAMES) == [directory / SCRIPT, directory / CARD]
    card = (directory / CARD).read_text()
    assert card.startswith("---\nbase_model: someone/model\n")
    assert 'custom_generate="someone/head"' in card
    assert "| tokens per verify pass on held-out text | 3.5 (trees of 16 nodes) |" in card
    assert "| trained for | 100 steps on 77 sequences |" in card
    compile((directory / SCRIPT).read_text(), "generate.py", "exec")


def test_a_card_without_measurements(directory: Path) -> None:
    (directory / "training.json").unlink()
    write_hub_files(directory, **NAMES)
    assert "| tokens per verify pass on held-out text | not measured |" in (directory / CARD).read_text()


@pytest.mark.parametrize("head", sorted(path.name for path in HEADS.iterdir()))
def test_heads_of_the_demo_get_a_card(head: str, tmp_path: Path) -> None:
    """Most of them were trained before a record had the number of held-out sequences."""
    for name in ("config.json", "training.json"):
        shutil.copy(HEADS / head / name, tmp_path)
    write_hub_files(tmp_path, **NAMES)
    assert re.search(
        r"held-out text \| [\d.]+ \(.*\d passes( over 32 sequences)?\)", (tmp_path / CARD).read_text()
    )


def test_refusals(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PublishError, match=r"is no drafter checkpoint: config.json is missing"):
        write_hub_files(tmp_path, **NAMES)
    with pytest.raises(PublishError, match="--repository: expected a name without quotes"):
        write_hub_files(directory, repository='a"b', model="m")
    write_hub_files(directory, **NAMES)
    assert main([str(directory), "--repository", "r", "--model", "m"]) == 2
    message = capsys.readouterr().err
    assert "generate.py: expected no such file, or --overwrite" in message
    assert main([str(directory), "--repository", "r", "--model", "m", "--overwrite"]) == 0
    assert 'REPOSITORY = "r"' in (directory / SCRIPT).read_text()
    (directory / "training.json").write_text("{")
    with pytest.raises(PublishError, match="is not valid JSON"):
        write_hub_files(directory, **NAMES, overwrite=True)
    for text in ("[1]", '{"settings": 5, "held_out": 3}'):
        (directory / "training.json").write_text(text)
        with pytest.raises(PublishError, match="is no record of a training"):
            write_hub_files(directory, **NAMES, overwrite=True)

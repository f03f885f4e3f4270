"""Each thing that cannot be decoded is refused in one line that names it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from drafters.config import DrafterConfigError
from integrations.transformers import head as head_module
from integrations.transformers.checks import GenerateError
from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from tests.integrations.transformers.models import PROMPT, make_head, make_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def head(llama: Any) -> SpeculativeHead:
    return SpeculativeHead(make_head(llama), llama)


def filled_cache(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_beams": 2},
            "num_beams .* expected greedy search or sampling .* got beam_search with num_beams=2",
        ),
        ({"use_cache": False}, "use_cache: expected True"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: expected False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: expected"),
        ({"cache_implementation": "offloaded"}, "cache_implementation: .* got an offloaded cache"),
    ],
)
def test_arguments(llama: Any, head: SpeculativeHead, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerateError, match=message):
        llama.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=head, **options)


def test_inputs(llama: Any, head: SpeculativeHead) -> None:
    def generate(mask: Any = None, **options: Any) -> None:
        mask = torch.ones(2, 4, dtype=torch.int64) if mask is None else torch.tensor(mask)
        llama.generate(
            torch.tensor([PROMPT[:4], PROMPT[:4]]),
            attention_mask=mask,
            max_new_tokens=4,
            custom_generate=head,
            **options,
        )

    with pytest.raises(
        GenerateError, match=r"attention_mask: .* padding on the left, got padding at the end"
    ):
        generate([[1, 1, 1, 0], [1] * 4])
    with pytest.raises(GenerateError, match=r"attention_mask: .* on the left alone, got some between"):
        generate([[1, 0, 1, 1], [1] * 4])
    with pytest.raises(GenerateError, match="token_streamer: expected one sequence, got 2"):
        generate(token_streamer=object())
    with pytest.raises(GenerateError, match="guidance_scale: expected a batch of one, got a batch of 2"):
        generate(guidance_scale=1.5)
    with pytest.raises(GenerateError, match="inputs_embeds: expected nothing but text, got Tensor"):
        llama.generate(inputs_embeds=torch.zeros(1, 3, 64), max_new_tokens=4, custom_generate=head)


def test_a_cache_with_text(llama: Any, head: SpeculativeHead) -> None:
    with pytest.raises(GenerateError, match=r"past_key_values: expected an empty cache, .* got 3 tokens"):
        llama.generate(torch.tensor([PROMPT]), past_key_values=filled_cache(llama), custom_generate=head)


def test_another_model(head: SpeculativeHead) -> None:
    with pytest.raises(GenerateError, match="model: expected the model that the head was loaded for"):
        make_model("llama").generate(torch.tensor([PROMPT]), custom_generate=head)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_static_caches_with_windows(model_type: str) -> None:
    """A text up to the window is decoded; a longer one is refused before anything is."""
    model = make_model(model_type, sliding_window=20)
    head = SpeculativeHead(make_head(model), model)
    options = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    found = model.generate(torch.tensor([PROMPT]), max_length=21, custom_generate=head, **options)
    assert torch.equal(found, model.generate(torch.tensor([PROMPT]), max_length=21, **options))
    with pytest.raises(GenerateError, match=r"max_length: expected at most 21, .* got 26"):
        model.generate(torch.tensor([PROMPT]), max_length=26, custom_generate=head, **options)


def test_chunked_attention() -> None:
    """No window that follows the text."""
    model = make_model("llama4_text", attention_chunk_size=12, layer_types=["chunked_attention"] * 2)
    head = SpeculativeHead(make_head(model), model)
    options = {"do_sample": False, "eos_token_id": None}
    found = model.generate(torch.tensor([PROMPT]), max_length=12, custom_generate=head, **options)
    assert torch.equal(found, model.generate(torch.tensor([PROMPT]), max_length=12, **options))
    for cache in (None, DynamicCache()):
        with pytest.raises(GenerateError, match=r"max_length: expected at most 12, .* got 13"):
            model.generate(
                torch.tensor([PROMPT]), max_length=13, custom_generate=head, past_key_values=cache, **options
            )


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("jamba", {}, r"model: expected attention in every layer, got JambaForCausalLM, .*\(LinearAttention"),
        ("bamba", {}, r"model: expected attention .* got BambaForCausalLM, which has recurrent"),
        ("mamba", {}, "model: .* argument position_ids, got MambaForCausalLM, which has none"),
        ("bloom", {}, "model: .* argument position_ids, got BloomForCausalLM, which has none"),
    ],
)
def test_models(llama: Any, model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerateError, match=message):
        SpeculativeHead(make_head(llama), make_model(model_type, **settings))


def replace_forward(monkeypatch: Any, model: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the mask and positions of every forward pass."""
    forward = model.forward

    def changed(
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **rest: Any,
    ) -> Any:
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        change(given)
        return forward(input_ids, past_key_values=past_key_values, **given, **rest)

    monkeypatch.setattr(model, "forward", changed)


@pytest.mark.parametrize(
    "ignored", [["attention_mask"], ["position_ids"], ["attention_mask", "position_ids"]]
)
def test_models_that_ignore_trees(monkeypatch: pytest.MonkeyPatch, ignored: list[str]) -> None:
    model = make_model("llama")
    head = make_head(model)
    replace_forward(monkeypatch, model, lambda given: given.update(dict.fromkeys(ignored)))
    with pytest.raises(GenerateError, match="model: expected attention that takes a mask of four dimensions"):
        SpeculativeHead(head, model)


def test_a_model_that_raises_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    head = make_head(model)

    def refuse(given: dict[str, Any]) -> None:
        if given["attention_mask"] is not None and given["attention_mask"].ndim == 4:
            raise ValueError("only two dimensions")

    replace_forward(monkeypatch, model, refuse)
    with pytest.raises(GenerateError, match="which raises ValueError: only two dimensions"):
        SpeculativeHead(head, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"vocab_size": 61},
            "vocab_size: expected the model's 60, got 61; .* made for another model, 'other'",
        ),
        ({"hidden_size": 32}, "hidden_size: expected the model's 64, got 32"),
        ({"base_num_layers": 3}, "base_num_layers: expected the model's 2, got 3"),
    ],
)
def test_heads_of_other_models(llama: Any, settings: dict[str, Any], message: str) -> None:
    head = make_head(llama)
    head.config = dataclasses.replace(head.config, base_model="other", **settings)
    with pytest.raises(GenerateError, match=message):
        SpeculativeHead(head, llama)


def test_streams(llama: Any) -> None:
    head = make_head(llama)
    head.config = dataclasses.replace(head.config, trunk="streams", target_layer_ids=(0,), num_layers=1)
    with pytest.raises(GenerateError, match="trunk: expected a head with passes of its own, got 'streams'"):
        SpeculativeHead(head, llama)


def test_other_weights_are_a_warning(llama: Any) -> None:
    head = make_head(llama)
    head.config = dataclasses.replace(head.config, base_weights="0" * 16)
    with pytest.warns(UserWarning, match="trained for a model of other weights"):
        SpeculativeHead(head, llama)


def test_options(llama: Any) -> None:
    with pytest.raises(GenerateError, match="tree: expected 'tree' or 'chain', got 'star'"):
        SpeculativeHead(make_head(llama), llama, DraftOptions(shape="star"))
    for wrong in (0, "a"):
        with pytest.raises(
            GenerateError, match=f"num_nodes: expected a whole number of at least 1, got {wrong!r}"
        ):
            SpeculativeHead(make_head(llama), llama, DraftOptions(num_nodes=wrong))  # type: ignore[arg-type]


def test_no_head(llama: Any, tmp_path: Any) -> None:
    with pytest.raises(DrafterConfigError, match=r"is no drafter checkpoint: config.json is missing"):
        SpeculativeHead.from_pretrained(tmp_path, llama)


def test_no_directory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> str:
        raise OSError("no such repository")

    monkeypatch.setattr(head_module, "cached_file", missing)
    with pytest.raises(GenerateError, match=r"directory: .* got 'heads/none': no such repository"):
        SpeculativeHead.from_pretrained("heads/none", llama)


def test_a_model_without_masks_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told from others when its head is loaded; a text that fits into the window is decoded."""
    kinds = ["sliding_attention", "full_attention"]
    model = make_model("gemma3_text", sliding_window=12, layer_types=kinds)
    drafter = make_head(model)

    def refuse(given: dict[str, Any]) -> None:
        if isinstance(given["attention_mask"], dict):
            raise TypeError("expected a tensor")

    replace_forward(monkeypatch, model, refuse)
    head = SpeculativeHead(drafter, model)
    found = model.generate(torch.tensor([PROMPT]), max_length=12, custom_generate=head)
    assert torch.equal(found, model.generate(torch.tensor([PROMPT]), max_length=12, do_sample=False))
    with pytest.raises(GenerateError, match=r"max_length: expected at most 12, .* got 13"):
        model.generate(torch.tensor([PROMPT]), max_length=13, custom_generate=head)

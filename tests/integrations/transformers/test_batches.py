"""Batches with left padding, in caches that grow and in caches of fixed size."""

from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from tests.integrations.transformers.models import (
    PAD,
    PROMPT,
    SIZES,
    KnownDrafts,
    make_head,
    make_model,
    with_drafts,
)

PROMPTS = [PROMPT, [33, 4], [8, 8, 50, 21], [12]]

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(**left_padded(prompts), **options)


@pytest.fixture(scope="module")
def texts(llama: Any) -> list[list[int]]:
    """Each prompt's own text, without an end and longer than any that a test asks for."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS + 10, "do_sample": False, "eos_token_id": None}
    return [llama.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tree_head(llama: Any) -> SpeculativeHead:
    return SpeculativeHead(make_head(llama), llama, DraftOptions(num_nodes=6))


# Tokens at which the texts of some prompts end early, so that the others go on alone.
ENDS = [59, [47, 3], [40, 33, 6]]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("end", ENDS)
def test_a_batch(
    monkeypatch: pytest.MonkeyPatch,
    llama: Any,
    tree_head: SpeculativeHead,
    texts: list[list[int]],
    end: Any,
    share: float,
    cache: str,
) -> None:
    expected = generate(llama, eos_token_id=end)
    head = with_drafts(monkeypatch, tree_head, lambda: KnownDrafts(texts, share))
    found = generate(llama, eos_token_id=end, custom_generate=head, cache_implementation=cache)
    assert torch.equal(found, expected)
    assert (head.tokens_per_step > 1.8) == (share > 0)


@pytest.mark.parametrize("settings", [{}, {"drafter_type": "medusa"}, {"drafter_type": "eagle"}])
def test_a_batch_with_a_head(llama: Any, settings: dict[str, Any]) -> None:
    head = SpeculativeHead(make_head(llama, **settings), llama, DraftOptions(num_nodes=6))
    assert torch.equal(generate(llama, custom_generate=head), generate(llama))


def test_penalties_beside_padding(llama: Any, tree_head: SpeculativeHead) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    assert torch.equal(generate(llama, custom_generate=tree_head, **options), generate(llama, **options))


def test_texts_end_at_different_lengths(llama: Any) -> None:
    """The tests above are about something."""
    lengths = {tuple((generate(llama, eos_token_id=end) != PAD).sum(1).tolist()) for end in ENDS}
    assert len(lengths) == len(ENDS)
    assert any(len(set(own)) > 3 for own in lengths)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9])
def test_a_full_static_cache(
    monkeypatch: pytest.MonkeyPatch,
    llama: Any,
    tree_head: SpeculativeHead,
    texts: list[list[int]],
    new_tokens: int,
) -> None:
    """At the end of a text the cache has room for smaller and smaller trees."""
    head = with_drafts(monkeypatch, tree_head, lambda: KnownDrafts(texts, 0.9))
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": None}
    found = generate(llama, custom_generate=head, cache_implementation="static", **options)
    assert torch.equal(found, generate(llama, **options))


def test_a_cache_of_the_user(llama: Any) -> None:
    head = SpeculativeHead(make_head(llama), llama)
    cache = StaticCache(config=llama.config, max_cache_len=64)
    assert torch.equal(generate(llama, custom_generate=head, past_key_values=cache), generate(llama))


def test_several_texts_for_a_prompt(llama: Any) -> None:
    head = SpeculativeHead(make_head(llama), llama)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "return_dict_in_generate": True}
    found = generate(llama, custom_generate=head, output_scores=True, **options)
    assert found.sequences.shape == (3 * len(PROMPTS), len(PROMPT) + NEW_TOKENS)
    assert len(found.scores) == NEW_TOKENS
    assert {tuple(score.shape) for score in found.scores} == {(3 * len(PROMPTS), SIZES["vocab_size"])}


class NotTwice(LogitsProcessor):
    """Each sequence of the batch, by its place, may not have one token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        places = torch.arange(len(scores))
        scores[places, torch.tensor([49, 24, 12, 3])[places]] = -torch.inf
        return scores


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_a_processor_that_knows_places(monkeypatch: pytest.MonkeyPatch, llama: Any, share: float) -> None:
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([NotTwice()])}
    expected = generate(llama, **options)
    assert not torch.equal(expected, generate(llama))
    head = SpeculativeHead(make_head(llama), llama, DraftOptions(num_nodes=6))
    lengths = [len(prompt) for prompt in PROMPTS]
    texts = [text[-NEW_TOKENS - length :].tolist() for text, length in zip(expected, lengths, strict=True)]
    with_drafts(monkeypatch, head, lambda: KnownDrafts(texts, share))
    assert torch.equal(generate(llama, custom_generate=head, **options), expected)


def test_prefill_in_chunks(llama: Any) -> None:
    head = SpeculativeHead(make_head(llama), llama)
    assert torch.equal(generate(llama, custom_generate=head, prefill_chunk_size=3), generate(llama))


def test_a_static_cache_with_room(
    monkeypatch: pytest.MonkeyPatch, llama: Any, tree_head: SpeculativeHead, texts: list[list[int]]
) -> None:
    """Trees stay as large as in a cache that grows."""
    head = with_drafts(monkeypatch, tree_head, lambda: KnownDrafts(texts, 0.8))
    rates = []
    with_room: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": 64}
    for options in ({}, with_room):
        generate(llama, eos_token_id=None, custom_generate=head, **options)
        rates.append(head.tokens_per_step)
    assert rates[0] == rates[1]

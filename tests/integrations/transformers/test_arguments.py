"""Sampling, processors, stopping criteria, streamers and dictionaries, as plain ``generate`` has them."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from tests.integrations.transformers.models import PROMPT, KnownDrafts, make_head, make_model, with_drafts

SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLING,
    "sampling with penalties": {
        **SAMPLING,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_p": 0.01,
    },
    "greedy with penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
    "bad words": {"bad_words_ids": [[47], [49, 57]], "suppress_tokens": [3]},
    "forced end": {"forced_eos_token_id": 4},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 2.0, "hashing_key": 15485863}},
    "guidance": {"guidance_scale": 1.5},
    "max_length": {"max_new_tokens": None, "max_length": 21},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


def generate(model: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    return model.generate(torch.tensor([PROMPT]), **options)


def known_head(monkeypatch: Any, model: Any, text: torch.Tensor, share: float = 0.7) -> SpeculativeHead:
    head = SpeculativeHead(make_head(model), model, DraftOptions(num_nodes=8))
    return with_drafts(monkeypatch, head, lambda: KnownDrafts(text.tolist(), share))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_text(monkeypatch: pytest.MonkeyPatch, llama: Any, name: str) -> None:
    """With a seed, every token is drawn with the number that plain ``generate`` draws it with."""
    expected = generate(llama, **OPTIONS[name])
    head = known_head(monkeypatch, llama, expected)
    assert torch.equal(generate(llama, custom_generate=head, **OPTIONS[name]), expected)
    assert head.tokens_per_step > 2


class Recorder(LogitsProcessor, StoppingCriteria):
    """Keeps what it sees; as a criterion it ends a text at a token."""

    def __init__(self, last: int = -1) -> None:
        self.seen: list[list[int]] = []
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.seen += input_ids.tolist()
        is_processor = isinstance(scores, torch.Tensor)
        return scores if is_processor else input_ids[:, -1] == self.last


def test_processors_and_criteria_see_each_text(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    text = generate(llama)
    end = int(text[0, 20])

    def seen(**options: Any) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
        processor, criterion = Recorder(), Recorder(end)
        found = generate(
            llama,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([criterion]),
            **options,
        )
        return processor.seen, criterion.seen, found

    expected = seen()
    found = seen(custom_generate=known_head(monkeypatch, llama, text))
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def test_streamer(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    expected, found = Streamer(), Streamer()
    text = generate(llama, streamer=expected)
    generate(llama, custom_generate=known_head(monkeypatch, llama, text), token_streamer=found)
    assert found.values == expected.values


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["greedy", "sampling with penalties"])
def test_dictionary(monkeypatch: pytest.MonkeyPatch, llama: Any, name: str, cache: str | None) -> None:
    options = {
        **OPTIONS[name],
        "cache_implementation": cache,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = generate(llama, **options)
    head = known_head(monkeypatch, llama, expected.sequences)
    found = generate(llama, custom_generate=head, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for own, plain in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.cat(own), torch.cat(plain), rtol=1e-4, atol=1e-4)
    # The cache holds the keys and values of the text that plain generate would have put there.
    length = int(expected.past_key_values.get_seq_length())
    assert int(found.past_key_values.get_seq_length()) == length
    for own, plain in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for kind in ("keys", "values"):
            states = getattr(own, kind)[:, :, :length], getattr(plain, kind)[:, :, :length]
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)

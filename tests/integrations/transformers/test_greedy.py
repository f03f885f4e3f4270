"""Greedy text is plain ``generate``'s, token for token, whatever is drafted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from tests.integrations.transformers.models import PROMPT, KnownDrafts, make_head, make_model, with_drafts

NEW_TOKENS = 24
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    "ctc-fused": {"frame_start": "fused", "transition": "mlp"},
    "ctc-residual": {"trunk": "residual"},
    "block": {"drafter_type": "block", "transition": "markov", "num_layers": 2},
    "dspark": {"drafter_type": "block", "trunk": "dspark", "transition": "markov"},
    "medusa": {"drafter_type": "medusa"},
    "hydra": {"drafter_type": "hydra"},
    "hydra-attention": {"drafter_type": "hydra", "num_layers": 1, "head_depth": 2},
    "eagle": {"drafter_type": "eagle"},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


def plain(model: Any, prompt: list[int] = PROMPT, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        torch.tensor([prompt]), **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    )
    return found


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("name", HEADS)
def test_every_head(llama: Any, name: str, shape: str) -> None:
    head = SpeculativeHead(make_head(llama, **HEADS[name]), llama, DraftOptions(num_nodes=6, shape=shape))
    assert torch.equal(plain(llama, custom_generate=head), plain(llama))
    assert head.tokens_per_step >= 1


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_accepted_drafts(monkeypatch: pytest.MonkeyPatch, model_type: str, share: float) -> None:
    model = make_model(model_type)
    expected = plain(model)
    head = SpeculativeHead(make_head(model), model, DraftOptions(num_nodes=7))
    with_drafts(monkeypatch, head, lambda: KnownDrafts(expected.tolist(), share))
    assert torch.equal(plain(model, custom_generate=head), expected)
    assert (head.tokens_per_step > 2.5) == (share > 0.5)


def test_a_directory(llama: Any, tmp_path: Path) -> None:
    make_head(llama).save_pretrained(tmp_path)
    head = SpeculativeHead.from_pretrained(tmp_path, llama, num_nodes=5, tree="chain")
    assert head.options == DraftOptions(num_nodes=5, shape="chain")
    assert torch.equal(plain(llama, custom_generate=head), plain(llama))


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_short_texts(llama: Any, new_tokens: int) -> None:
    head = SpeculativeHead(make_head(llama), llama)
    found = plain(llama, custom_generate=head, max_new_tokens=new_tokens)
    assert torch.equal(found, plain(llama, max_new_tokens=new_tokens))


def test_nothing_stays_on_the_model(llama: Any) -> None:
    """No hook that keeps hidden states when the model is used without the head."""
    plain(llama, custom_generate=SpeculativeHead(make_head(llama), llama))
    assert not any(layer._forward_hooks for layer in llama.model.layers)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_end_of_a_text(monkeypatch: pytest.MonkeyPatch, llama: Any, share: float) -> None:
    """A text ends at its end token, even if drafts after it would be accepted."""
    expected = plain(llama, eos_token_id=3)
    assert expected.shape[1] < len(PROMPT) + NEW_TOKENS
    head = SpeculativeHead(make_head(llama), llama)
    with_drafts(monkeypatch, head, lambda: KnownDrafts(plain(llama).tolist(), share))
    assert torch.equal(plain(llama, eos_token_id=3, custom_generate=head), expected)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_as_many_positions_as_tokens(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """At the end of a text no draft has a position that the model has not learnt."""
    length = len(PROMPT) + NEW_TOKENS
    model = make_model(model_type, max_position_embeddings=length, eos_token_id=None)
    expected = plain(model)
    head = SpeculativeHead(make_head(model), model)
    with_drafts(monkeypatch, head, lambda: KnownDrafts([[*expected[0].tolist(), *range(20)]], 1.0))
    assert torch.equal(plain(model, custom_generate=head), expected)

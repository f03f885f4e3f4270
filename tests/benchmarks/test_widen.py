"""A model in a larger shape: the same logits and the same text, and a head that drafts the same."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.widen import main, widen_head, widen_model
from drafters.build import load_drafter
from runtime.core.errors import UserError

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def greedy(model: Any, count: int) -> list[int]:
    ids = torch.tensor([[5, 60, 7, 200]])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return [int(token) for token in ids[0]]


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_text_are_the_same(model: Any, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    if tied:
        torch.manual_seed(3)
        config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": True})
        model = LlamaForCausalLM(config).eval()
    # A large epsilon shows whether it is rescaled.
    model = copy.deepcopy(model)
    for norm in [*(layer.input_layernorm for layer in model.model.layers), model.model.norm]:
        norm.variance_epsilon = 0.1
    model.config.rms_norm_eps = 0.1
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 0.1
    wide = widen_model(model, SIZES)
    assert {name: getattr(wide.config, name) for name in SIZES} == SIZES
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    assert greedy(wide, 12) == greedy(model, 12)


def test_no_two_matrices_are_equal(model: Any) -> None:
    """They would be stored and read once, as zeros in the output matrices of new layers once were."""
    wide = widen_model(model, SIZES)
    matrices = [value for value in wide.state_dict().values() if value.ndim == 2]
    assert len({matrix.numpy().tobytes() for matrix in matrices}) == len(matrices)
    last, hidden = wide.model.layers[-1], model.config.hidden_size
    for matrix in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp.up_proj, last.mlp.down_proj):
        assert matrix.weight.count_nonzero() == matrix.weight.numel()
    for matrix in (last.self_attn.v_proj, last.mlp.gate_proj):
        assert matrix.weight[:, hidden:].all()
        assert not matrix.weight[:, :hidden].any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"frame_start": "fused", "start_size": 24, "transition": "mlp"},
        {"frame_start": "fused", "draft_vocab_size": 120},
        {"drafter_type": "medusa", "own_lm_head": True},
    ],
)
def test_a_head_drafts_the_same(
    model: Any, make_tiny_head: Callable[..., Any], settings: dict[str, Any]
) -> None:
    head = make_tiny_head(**settings)
    wide_model = widen_model(model, SIZES)
    wide = widen_head(head, model.config, wide_model.config).attach_model(wide_model)
    ids = torch.tensor([[5, 60, 7, 200, 9]])

    def draft(drafter: Any, target: Any) -> torch.Tensor:
        states = target(ids, output_hidden_states=True).hidden_states
        # The first of them is the embedding; the last may have been normed, so a hook's value is not used.
        features = torch.cat([states[1], states[1]], dim=-1)
        positions = torch.arange(5)[None]
        frames = 5 + torch.arange(4)[None]
        mask = torch.ones(1, 1, 4, 9, dtype=torch.bool)
        hidden = drafter(features, positions, torch.tensor([[11]]), frames, mask)
        logits: torch.Tensor = drafter.logits(hidden.unflatten(1, (1, 4)))
        return logits

    with torch.no_grad():
        torch.testing.assert_close(draft(wide, wide_model), draft(head, model), rtol=0, atol=1e-4)
    if wide.transition is not None:
        states = torch.randn(1, 4, 64)
        padded = torch.nn.functional.pad(states, (0, 32))
        previous = torch.tensor([[3, 4]])
        with torch.no_grad():
            found = wide.transition.state(padded, previous, wide.embed_tokens)
            torch.testing.assert_close(found, head.transition.state(states, previous, head.embed_tokens))


def test_command(tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    argv = ["--model", str(tiny_model_dir), "--drafter", str(tiny_drafter_dir), "--out", str(tmp_path / "w")]
    argv += ["--hidden-size", "96", "--layers", "3", "--intermediate-size", "136"]
    assert main(argv) == 0
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "w/model")
    assert greedy(wide, 8) == greedy(model, 8)
    assert (tmp_path / "w/model/tokenizer.json").is_file()
    head = load_drafter(tmp_path / "w/head")
    assert (head.config.hidden_size, head.config.base_num_layers) == (96, 3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 32}, "--hidden-size: must be at least the model's 64"),
        ({"num_attention_heads": 9, "num_key_value_heads": 4}, "--heads: must be a multiple"),
        ({"num_key_value_heads": 4}, "--heads: must be a multiple"),
        ({"hidden_size": 66}, "--hidden-size: must be a multiple of --heads 4, got 66"),
    ],
)
def test_wrong_shapes(model: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        widen_model(model, sizes)

"""Smoothing that the weights before a product take: logits stay, and nothing is left for a pass to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from export.quantisation.choose_smoothing import smooth_products
from export.quantisation.precision import WeightForm
from export.quantisation.smoothing import PreviousLayer, Smoothing, previous_layers
from export.source import load_source

IDS = torch.arange(40).unsqueeze(0)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}


def family(config: type[PreTrainedConfig]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES)).eval()
    for parameter in model.parameters():
        # Biases, which Qwen2's values have, are zero at first.
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def inputs_of(model: Any, products: list[nn.Linear]) -> list[NDArray[np.float32]]:
    found: dict[nn.Module, Tensor] = {}
    handles = [
        product.register_forward_pre_hook(lambda module, inputs: found.update({module: inputs[0]}))
        for product in products
    ]
    model(IDS)
    for handle in handles:
        handle.remove()
    return [found[product].numpy() for product in products]


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Gemma2Config])
def test_inputs_are_smoothed_and_no_logit_changes(config: type[PreTrainedConfig], is_rotated: bool) -> None:
    model = family(config)
    known = previous_layers(model)
    assert len(known) == 2 * SIZES["num_hidden_layers"]
    products = list(known)
    before, logits = inputs_of(model, products), model(IDS).logits
    random = np.random.default_rng(0)
    smoothings = []
    for product in products:
        previous = known[product]
        factors = previous.shared(random.uniform(0.5, 2, product.in_features).astype(np.float32))
        smoothings.append(Smoothing(factors, is_rotated))
        left = previous.absorb(product, smoothings[-1])
        # An activation stands before a down projection's inputs, and no rotation passes through that.
        assert left.factors is None
        assert left.is_rotated == (is_rotated and not previous.passes_rotations)
        if not previous.passes_rotations:
            smoothings[-1] = Smoothing(factors)
    np.testing.assert_allclose(model(IDS).logits, logits, atol=2e-4)
    for now, rows, smoothing in zip(inputs_of(model, products), before, smoothings, strict=True):
        expected = smoothing.of_inputs(np.ascontiguousarray(rows))
        assert np.abs(expected - rows).max() > 0.1
        np.testing.assert_allclose(now, expected, atol=1e-3)


def test_heads_that_share_values_share_factors() -> None:
    previous = PreviousLayer(nn.Linear(8, 6), head_dim=3, num_groups=2)
    rms = np.arange(1, 13, dtype=np.float32)
    shared = previous.shared(rms).reshape(2, 2, 3)
    np.testing.assert_array_equal(shared[:, 0], shared[:, 1])
    np.testing.assert_allclose(shared[0, 0], np.sqrt([(1 + 16) / 2, (4 + 25) / 2, (9 + 36) / 2]), rtol=1e-6)


@pytest.mark.parametrize("has_streams", [False, True])
def test_streams_keep_the_layers_that_they_run_through(
    has_streams: bool, tiny_model_dir: Path, stream_bundle_of: Callable[[str], Path]
) -> None:
    source = load_source(tiny_model_dir, stream_bundle_of("ctc").parent / "head" if has_streams else None)
    before = {name: weight.clone() for name, weight in source.model.named_parameters()}
    smooth_products(source, None, WeightForm("int8", None))
    changed = {
        name.split(".")[-2]
        for name, weight in source.model.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert changed == (set() if has_streams else {"v_proj", "o_proj", "up_proj", "down_proj"})

"""The mask of a sliding window against its definition, slot by slot."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from export.graphs.layers import attention_masks, windowed_mask

CAPACITY = 12
# Two trees of four nodes, after two and after five tokens: nodes 1 and 2 share a position.
WRITE_INDEX = torch.tensor([2, 5])
POSITION_IDS = torch.tensor([[2, 3, 3, 4], [5, 6, 6, 7]])


def make_mask() -> torch.Tensor:
    return torch.rand(2, 1, 4, CAPACITY, generator=torch.Generator().manual_seed(0)) < 0.7


@pytest.mark.parametrize("window", [1, 2, 3, 20])
def test_a_key_is_seen_until_it_is_a_window_away(window: int) -> None:
    mask = make_mask()
    found = windowed_mask(mask, POSITION_IDS, WRITE_INDEX, window)
    for sequence, written in enumerate(WRITE_INDEX.tolist()):
        positions = [*range(written), *POSITION_IDS[sequence].tolist()]
        for query, at in enumerate(POSITION_IDS[sequence].tolist()):
            for slot, position in enumerate(positions):
                expected = bool(mask[sequence, 0, query, slot]) and position > at - window
                assert bool(found[sequence, 0, query, slot]) == expected
    assert not (found & ~mask).any()


def test_a_slot_that_is_idle_sees_a_key() -> None:
    """Its positions are behind all columns of the mask. A row without a key would not be a number."""
    mask = torch.ones(2, 1, 4, CAPACITY, dtype=torch.bool)
    found = windowed_mask(mask, POSITION_IDS + 100, WRITE_INDEX + 100, 3)
    assert found.any(-1).all()


@pytest.mark.parametrize(
    ("model_type", "settings", "names"),
    [
        ("mistral", {}, None),
        ("gemma2", {"num_hidden_layers": 2}, ["full_attention", "sliding_attention"]),
        ("gemma2", {"num_hidden_layers": 1}, ["full_attention", "sliding_attention"]),
    ],
)
def test_models_are_given_the_masks_they_expect(
    model_type: str, settings: dict[str, Any], names: list[str] | None
) -> None:
    config = AutoConfig.for_model(model_type, sliding_window=3, **settings)
    mask = make_mask()
    inputs = {"attn_mask": mask, "position_ids": POSITION_IDS, "write_index": WRITE_INDEX}
    narrow = windowed_mask(mask, POSITION_IDS, WRITE_INDEX, 3)
    found = attention_masks(config, inputs, context=4)
    if isinstance(found, dict):
        assert sorted(found) == names
        assert found["full_attention"] is mask
        assert torch.equal(found["sliding_attention"], narrow)
    else:
        assert names is None
        assert torch.equal(found, narrow)
    assert attention_masks(config, inputs, context=3) is mask

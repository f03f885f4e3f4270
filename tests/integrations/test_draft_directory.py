"""What a draft directory may hold, for any engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from integrations.draft_directory import DraftError, DraftSettings, head_problem, model_problem
from tests.integrations.heads import head_config


def test_settings_are_read_back() -> None:
    config = SimpleNamespace(ctc_speculator={"head": head_config().to_dict(), "top_k": 5, "shape": "tree"})
    assert DraftSettings.read(config, "draft") == DraftSettings(head_config(), 5, "tree")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "^draft/config.json: expected the key 'ctc_speculator'"),
        ({"head": {}, "top_k": 5}, "^draft/config.json: expected the key 'ctc_speculator'"),
        (
            {"head": head_config().to_dict(), "top_k": 5, "shape": "bush"},
            "^draft/config.json: ctc_speculator: shape: expected tree or chain, got 'bush'",
        ),
        *(
            (
                {"head": head_config().to_dict(), "top_k": top_k, "shape": "chain"},
                f"^draft/config.json: ctc_speculator: top_k: expected 1 to 90, got {top_k!r}$",
            )
            for top_k in (0, 91, "5", None)
        ),
        (
            {"head": {}, "top_k": 5, "shape": "chain"},
            "^draft/config.json: ctc_speculator: field 'intermediate_size' is missing",
        ),
        (
            {"head": head_config(drafter_type="medusa").to_dict(), "top_k": 5, "shape": "chain"},
            "^draft/config.json: ctc_speculator: drafter_type: expected ctc or block, got 'medusa'",
        ),
    ],
)
def test_a_directory_that_cannot_be_read(values: Any, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        DraftSettings.read(SimpleNamespace(ctc_speculator=values), "draft")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter_type": "hydra"}, "drafter_type: expected ctc or block, got 'hydra'"),
        ({"drafter_type": "eagle"}, "drafter_type: expected ctc or block, got 'eagle'"),
        ({"trunk": "residual"}, "trunk: expected 'attention'"),
        (
            {"trunk": "streams", "num_layers": 2},
            "trunk: expected a head with passes of its own",
        ),
    ],
)
def test_heads_without_chains_in_other_engines(settings: dict[str, Any], message: str) -> None:
    assert (head_problem(head_config(**settings)) or "").startswith(message)


def test_heads_with_chains_in_other_engines() -> None:
    assert head_problem(head_config()) is None
    assert head_problem(head_config(drafter_type="block", transition="markov", num_layers=2)) is None


def test_other_models() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 16, "num_layers": 4}
    assert model_problem(head_config(), **sizes) is None
    for name, field in (("vocab_size",) * 2, ("hidden_size",) * 2, ("num_layers", "base_num_layers")):
        problem = model_problem(head_config(base_model="m"), **{**sizes, name: 7})
        assert problem is not None
        assert problem.startswith(f"{field}: expected the model's 7, got")
        assert problem.endswith("the head was made for another model, 'm'")

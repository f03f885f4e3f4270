"""The table of head types: its modules exist, and its families are the runtime's."""

import inspect

import pytest

from drafters import tree_search
from drafters.autoregressive import AutoregressiveDrafter
from drafters.build import build_drafter
from drafters.config import DrafterConfig, HeadSettings
from drafters.head_types import AUTOREGRESSIVE, HEAD_FAMILIES, HEAD_TYPES, PARALLEL, STREAMING
from drafters.parallel import ParallelDrafter
from export.heads import EXPORTS
from runtime.core import bundle, prefix_search
from runtime.load.host import PROPOSERS
from training.head_set import FAMILY_TRAINING

CLASSES = {PARALLEL: ParallelDrafter, AUTOREGRESSIVE: AutoregressiveDrafter}


def test_families_are_the_runtimes_and_known_everywhere() -> None:
    assert (PARALLEL, AUTOREGRESSIVE) == (bundle.PARALLEL, bundle.AUTOREGRESSIVE)
    assert bundle.STREAMING == STREAMING
    assert {kind.family for kind in HEAD_TYPES.values()} == FAMILY_TRAINING.keys() == CLASSES.keys()
    assert HEAD_FAMILIES.keys() == CLASSES.keys() | {STREAMING}
    assert EXPORTS.keys() == PROPOSERS.keys() == HEAD_FAMILIES.keys()
    assert all(family.name == name for name, family in HEAD_FAMILIES.items())


def test_searches_in_fixed_shapes_keep_as_many_prefixes() -> None:
    assert all(tree_search.kept_prefixes(size) == prefix_search.kept_prefixes(size) for size in range(100))


@pytest.mark.parametrize(
    ("drafter_type", "trunk"), [(name, trunk) for name, kind in HEAD_TYPES.items() for trunk in kind.trunks]
)
def test_a_type_alone_describes_a_head_of_its_family(drafter_type: str, trunk: str) -> None:
    """With the defaults of the type, which lie within its own limits."""
    settings = HeadSettings(drafter_type=drafter_type, trunk=trunk)
    config = DrafterConfig(
        drafter_type=drafter_type,
        trunk=trunk,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        target_layer_ids=settings.default_target_layers(3),
        base_num_layers=3,
    )
    head = build_drafter(config)
    assert isinstance(head, CLASSES[config.family])
    assert not inspect.isabstract(type(head))
    assert f"{type(head).__module__}:{type(head).__name__}" == config.trunk_type.module
    least, most = config.trunk_type.min_layers, config.trunk_type.max_layers
    assert least <= config.num_layers <= (config.num_layers if most is None else most)


@pytest.mark.parametrize(
    ("drafter_type", "trunk", "num_layers"),
    [
        ("ctc", "attention", 1),
        ("block", "attention", 1),
        ("medusa", "residual", 0),
        ("hydra", "attention", 0),
        ("eagle", "attention", 1),
        ("streaming", "streams", 2),
    ],
)
def test_defaults_of_a_type(drafter_type: str, trunk: str, num_layers: int) -> None:
    settings = HeadSettings(drafter_type=drafter_type)
    assert (settings.trunk, settings.num_layers) == (trunk, num_layers)

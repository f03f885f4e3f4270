"""The settings of a head by flags: recommended ones, presets, and what a flag changes of them."""

from pathlib import Path

import pytest

from training.config import TrainingConfig, parse_config
from training.head_config import PRESETS, HeadConfig, read_heads
from training.settings import TrainingError

DEMO_HEADS = Path(__file__).resolve().parents[2] / "demo" / "heads.toml"


def head(*flags: str) -> HeadConfig:
    config: TrainingConfig = parse_config(
        ["--model", "m", "--data", "d", "--out", "o", *flags], "description"
    )
    return config.heads[0]


def test_a_head_is_as_recommended_unless_told() -> None:
    expected = HeadConfig(
        frame_start="fused", num_frames=12, num_labels=10, transition="mlp", soft_labels=0.5
    )
    assert head() == head("--preset", "ctc") == head("--drafter-type", "ctc") == expected


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_heads_of_the_tables(name: str) -> None:
    """But for the learning rate, which was chosen for a small model."""
    published = {each.name: each for each in read_heads(DEMO_HEADS)}
    table = published["ctc-paper" if name == "paper" else name].published()
    own = head("--preset", name).published()
    for values in (table, own):
        del values["name"], values["learning_rate"]
    assert own == table


def test_a_flag_replaces_a_setting_of_a_preset() -> None:
    assert head("--preset", "eagle", "--num-frames", "5").num_labels == 5
    changed = head("--num-frames", "6", "--soft-labels", "0")
    assert (changed.num_frames, changed.num_labels, changed.soft_labels) == (6, 4, 0)
    assert (changed.frame_start, changed.transition) == ("fused", "mlp")
    assert head("--num-frames", "12").num_labels == 10
    assert head("--preset", "paper", "--transition", "markov").transition == "markov"


def test_what_a_trunk_or_type_cannot_have_is_not_recommended_for_it() -> None:
    residual = head("--trunk", "residual")
    assert (residual.frame_start, residual.transition, residual.num_frames) == ("anchor", "mlp", 12)
    assert head("--trunk", "streams") == HeadConfig(trunk="streams")
    assert head("--drafter-type", "medusa") == HeadConfig(drafter_type="medusa")


def test_a_table_of_a_file_says_what_it_means(tmp_path: Path) -> None:
    """Files that are older than the recommendation keep their meaning."""
    path = tmp_path / "heads.toml"
    path.write_text('[[head]]\nname = "a"\n')
    assert read_heads(path) == (HeadConfig(name="a"),)
    assert (HeadConfig().num_frames, HeadConfig().transition, HeadConfig().frame_start) == (
        8,
        "none",
        "anchor",
    )


def test_a_preset_of_another_type_or_beside_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"^--drafter-type: the preset medusa is a medusa head, got 'hydra'"
    ):
        head("--preset", "medusa", "--drafter-type", "hydra")
    path = tmp_path / "heads.toml"
    path.write_text('[[head]]\nname = "a"\n')
    with pytest.raises(TrainingError, match=rf"^--preset: belongs into {path}, because --heads is given"):
        head("--preset", "medusa", "--heads", str(path))

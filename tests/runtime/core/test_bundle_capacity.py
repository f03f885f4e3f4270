"""Capacities of caches: the formulas that the exporter and both kinds of step share."""

from runtime.core.bundle import (
    AUTOREGRESSIVE,
    PARALLEL,
    drafter_capacity,
    streaming_capacity,
    target_model_capacity,
)


def test_behind_the_text_is_a_tree_or_the_longest_path() -> None:
    assert target_model_capacity(64, 7, 4) == 72
    assert target_model_capacity(64, 7, 9) == 80
    assert target_model_capacity(64, 0, 1) == 72


def test_a_head_has_its_frames_or_the_nodes_of_all_levels_behind() -> None:
    assert drafter_capacity(64, padding=5, family=PARALLEL, num_frames=3) == 72
    assert drafter_capacity(64, padding=5, family=PARALLEL, num_frames=4) == 80
    assert drafter_capacity(64, padding=4, family=AUTOREGRESSIVE, num_frames=4, beam_width=4) == 80
    assert drafter_capacity(64, padding=5, family=AUTOREGRESSIVE, num_frames=4, beam_width=4) == 88


def test_streams_of_all_nodes_are_behind_a_tree() -> None:
    assert streaming_capacity(64, 3, 5) == 88

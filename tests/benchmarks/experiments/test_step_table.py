"""Counting the layers of a parsed network."""

from benchmarks.experiments.step_table import count_layers


def test_count_layers_is_the_docstring_example() -> None:
    counts = count_layers({"CONSTANT": 3, "CAST": 2, "TOPK": 1})
    assert counts == {"layers": 6, "working": 3, "not_elementwise": 1}

"""Only rounding excuses a difference from a reference, and only nodes of nearly equal rank change places."""

import numpy as np

from export.verify.comparison import compare, float_difference
from export.verify.runner import decoded, encoded


def test_values_of_half_precision_are_rounded_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.1415927], np.float32)
    rounded = decoded(encoded(values, "bfloat16"), "bfloat16")
    assert rounded.tolist() == [1.0, 1.0, 1 + 4 * 2**-8, -3.140625]
    assert decoded(encoded(values, "float16"), "float16").dtype == np.float32
    assert encoded(np.array([3]), "int64").dtype == np.int64


def test_only_rounding_excuses_a_difference() -> None:
    ones = np.ones(3, np.float32)
    assert float_difference(np.array([1, np.nan, 1], np.float32), ones) == float("inf")
    dead = np.array([0, -np.inf, 1], np.float32)
    assert float_difference(dead, dead) == 0
    assert float_difference(ones, dead) == float("inf")
    # Two labels of nearly the same rank may change places, others may not.
    expected = {"frame_tokens": np.array([[5, 6, 7]]), "frame_logprobs": np.array([[-1, -1.00001, -4.0]])}
    swapped = {**expected, "frame_tokens": np.array([[6, 5, 7]])}
    assert compare("drafter", {}, swapped, expected, 1e-4)[1] == []
    wrong = {**expected, "frame_tokens": np.array([[7, 6, 5]])}
    assert "frame_tokens: 2 of 3 differ" in compare("drafter", {}, wrong, expected, 1e-4)[1][0]
    logits = {"next_tokens": np.array([[1]]), "logits": np.array([[[0.0, 4.0, 3.9999]]])}
    assert compare("backbone", {}, {**logits, "next_tokens": np.array([[2]])}, logits, 1e-4)[1] == []
    assert compare("backbone", {}, {**logits, "next_tokens": np.array([[0]])}, logits, 1e-4)[1]


def tree(order: list[int]) -> dict[str, np.ndarray]:
    """A root with two children in one of two orders, behind 3 tokens."""
    ids, probabilities = np.array([5, 8, 9]), np.array([1, 0.4, 0.3])
    ancestors = np.eye(3, dtype=np.bool_)
    ancestors[:, 0] = True
    mask = np.zeros((1, 3, 8), np.bool_)
    mask[..., :3], mask[..., 3:6] = True, ancestors
    return {
        "input_ids": ids[order][None],
        "position_ids": np.array([[3, 4, 4]]),
        "attn_mask": mask[None],
        "parents": np.array([[-1, 0, 0]]),
        "depths": np.array([[0, 1, 1]]),
        "ancestors": ancestors[None],
        "node_log_probs": np.log(probabilities[order])[None],
    }


def test_trees_may_differ_in_the_order_of_nodes() -> None:
    lengths, expected, swapped = {"lengths": np.array([3])}, tree([0, 1, 2]), tree([0, 2, 1])
    assert compare("search_4", lengths, swapped, expected, 1e-4)[1] == []
    for name, value, message in (
        ("input_ids", [[5, 9, 7]], "has probability"),
        ("depths", [[0, 1, 2]], "depths are not"),
        ("position_ids", [[3, 4, 5]], "positions are not"),
        ("parents", [[-1, 2, 0]], "before its parent"),
        ("ancestors", np.eye(3, dtype=np.bool_)[None], "ancestors are not"),
        ("attn_mask", ~swapped["attn_mask"], "the mask is not"),
    ):
        wrong = {**swapped, name: np.asarray(value)}
        assert message in compare("search_4", lengths, wrong, expected, 1e-4)[1][0]


def test_places_that_no_node_fills_have_no_parent() -> None:
    """They have probability 0; two nodes before such a place may change places as in any tree."""
    lengths, expected, swapped = {"lengths": np.array([3])}, tree([0, 1, 2]), tree([0, 2, 1])
    for each in (expected, swapped):
        each["attn_mask"] = np.pad(each["attn_mask"], ((0, 0), (0, 0), (0, 1), (0, 0)))
        each["attn_mask"][0, 0, 3, [0, 1, 2, 6]] = True
        each["ancestors"] = np.pad(each["ancestors"], ((0, 0), (0, 1), (0, 1)))
        each["ancestors"][0, 3, 3] = True
        for name, value in (
            ("input_ids", 5),
            ("position_ids", 3),
            ("parents", -1),
            ("depths", 0),
            ("node_log_probs", -np.inf),
        ):
            each[name] = np.append(each[name], [[value]], axis=1)
    assert compare("search_4", lengths, swapped, expected, 1e-4)[1] == []
    swapped["node_log_probs"][0, 3] = np.log(0.2)
    assert "before its parent" in compare("search_4", lengths, swapped, expected, 1e-4)[1][0]

"""The limits of a JSON body, checked before it is parsed."""

import time

import pytest

from runtime.core.errors import RequestError
from triton_repo.web.json_body import BOOL, MAX_BODY_BYTES, TEXT, Kind, depth

QUARTER = MAX_BODY_BYTES // 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ('"x"', 0),
        ('{"a": [1, {"b": []}], "c": {}}', 4),
        ("[" * 50_000 + "]" * 50_000, 50_000),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, 50_000),
        ('{"a": "' + "[" * 50_000 + '"}', 1),
        (r'["\"[[[[", "\\", [[]]]', 3),
        ('["[[[[', 1),  # a string that does not end
        ("[]{}" * 20, 1),
        ("]]]][[", 0),  # no JSON, and no harm
        ('["\u2713\U0001f600", ["\u00fc"]]', 2),
    ],
)
def test_depth(text: str, expected: int) -> None:
    assert depth(text) == expected


@pytest.mark.parametrize(
    "text", ["[" * 4 * QUARTER, "[],]" * QUARTER, '"",[' * QUARTER, '\\"\\"' * QUARTER, '"\\""' * QUARTER]
)
def test_the_largest_texts_take_a_moment(text: str) -> None:
    began = time.process_time()
    depth(text)
    assert time.process_time() - began < 3


@pytest.mark.parametrize("kind", [BOOL, TEXT, Kind(float, "a number"), Kind(dict, "a JSON object")])
def test_a_wrong_value_is_refused_with_its_field(kind: Kind) -> None:
    """Also a text that no UTF-8 has, and a number that no word of a machine has."""
    for value in ("\ud800", ["\ud800"], 10**400, None):
        if kind is TEXT and isinstance(value, str):
            continue
        with pytest.raises(RequestError, match=f"^field: must be {kind.words}, got"):
            kind.read("field", value)

"""Messages of both forms, and what is no message."""

from typing import Any

import pytest

from runtime.core.messages import (
    OPENAI,
    SHAREGPT,
    Form,
    MessageError,
    first_user_text,
    read_content,
    read_role,
)

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("message", "form", "role"),
    [
        ({"role": "user", "content": "hi"}, OPENAI, "user"),
        ({"role": "developer", "content": "hi"}, OPENAI, "system"),
        ({"from": "human", "value": "hi"}, SHAREGPT, "user"),
        ({"from": "gpt", "value": "hi"}, SHAREGPT, "assistant"),
    ],
)
def test_both_forms(message: dict[str, Any], form: Form, role: str) -> None:
    assert (read_role(message, form), read_content(message, form)) == (role, "hi")


@pytest.mark.parametrize(("separator", "expected"), [("", "ab"), ("\n", "a\nb")])
def test_parts(separator: str, expected: str) -> None:
    assert read_content({"content": PARTS}, separator=separator) == expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", "field 'role' of a message is missing"),
        ({"content": "hi"}, "field 'role' of a message is missing"),
        ({"role": ["user"]}, "field 'role': expected text, got list"),
        ({"role": "human"}, "field 'role': expected one of user, got 'human'"),
    ],
)
def test_what_is_no_role(message: Any, error: str) -> None:
    with pytest.raises(MessageError, match=f"^{error}$"):
        read_role(message, roles={"user": "user"})


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, "field 'content' of a message is missing"),
        ({"content": None}, "field 'content': expected text, got NoneType"),
        ({"content": [{"type": "image_url"}]}, "field 'content': expected parts .*, got 'image_url'"),
        ({"content": [{"type": "text", "text": 3}]}, "field 'content': expected parts .*, got 'text'"),
        ({"content": ["a"]}, "field 'content': expected parts of the type 'text', got 'str'"),
    ],
)
def test_what_is_no_content(message: Any, error: str) -> None:
    with pytest.raises(MessageError, match=f"^{error}$"):
        read_content(message)


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([{"role": "tool", "content": "x"}, {"role": "user", "content": PARTS}], "ab"),
        ([{"from": "system", "value": "x"}, {"from": "human", "value": "a"}], "a"),
        ([{"role": "user", "content": 3}, {"role": "user", "content": "b"}], None),
        (["hi", {"role": "assistant", "content": "b"}], None),
        ("hi", None),
    ],
)
def test_the_first_user_s_text(conversation: Any, expected: str | None) -> None:
    assert first_user_text(conversation) == expected

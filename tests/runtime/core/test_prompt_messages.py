"""Messages of both forms, and what is no message."""

from typing import Any

import pytest

from runtime.core.prompts import (
    OPENAI,
    SHAREGPT,
    Form,
    MessageError,
    read_content,
    read_conversation,
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


def test_conversations_of_both_forms() -> None:
    user, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
    assert read_conversation([{"role": "user", "content": PARTS}, answer]) == [user, answer]
    sharegpt = [
        {"from": "system", "value": "x"},
        {"from": "human", "value": "ab"},
        {"from": "gpt", "value": "c"},
    ]
    assert read_conversation(sharegpt) == [{"role": "system", "content": "x"}, user, answer]
    assert read_conversation([{**user, "name": "me"}, {**answer, "name": None}]) == [
        {**user, "name": "me"},
        answer,
    ]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_with_calls_may_have_no_content(content: dict[str, None]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "tool_calls": [call], **content}
    assert read_conversation([answer]) == [{**answer, "content": ""}]
    for wrong in ({**answer, "tool_calls": []}, {**answer, "role": "user"}, {**answer, "content": 3}):
        with pytest.raises(MessageError, match=r"^message 1: field 'content'"):
            read_conversation([wrong])


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ("hi", "expected a list of messages, got 'hi'"),
        ([], r"expected a list of messages, got '\[\]'"),
        (["hi"], "message 1: field 'role' of a message is missing"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": 3}],
            "message 2: field 'content': exp",
        ),
        ([{"role": "critic", "content": "x"}], "message 1: field 'role': expected one of human, user"),
        ([{"from": "user"}], "message 1: field 'value' of a message is missing"),
    ],
)
def test_what_is_no_conversation(conversation: Any, message: str) -> None:
    with pytest.raises(MessageError, match=f"^{message}"):
        read_conversation(conversation)

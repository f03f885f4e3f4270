"""The Responses interface: OpenAI's own client and its types, and the chat that says the same."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from runtime.core.errors import RequestError
from tests.schemas import DIGIT, record
from tests.triton_repo.servers import Server, openai_client
from triton_repo.openai.bodies import read_chat
from triton_repo.openai.responses import read_response
from triton_repo.openai.tool_calls import HERMES
from triton_repo.triton.tensors import MODEL

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = record(digit=DIGIT)


@pytest.fixture(scope="module")
def client(each_server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(each_server.url) as client:
        yield client


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    """The choice of a chat with the same settings."""
    given = {"model": MODEL, "temperature": 0, "max_tokens": 24, **options}
    (choice,) = client.chat.completions.create(messages=messages, **given).choices
    return choice


def checked(found: Any) -> Any:
    """A response as the client's types have it, without a field that they do not know or that is missing."""
    values = found.model_dump(by_alias=True)
    assert Response.model_validate(values, strict=True).model_extra in ({}, {"store": False})
    return values


def streamed(client: openai.OpenAI, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events of a stream, and the response of the last one, which the deltas must have told."""
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        assert EVENT.validate_python(event.model_dump(by_alias=True)).type == event.type
    response = checked(events[-1].response)
    assert events[-1].type == f"response.{response['status']}"
    for number, item in enumerate(response["output"]):
        name = "output_text" if item["type"] == "message" else "function_call_arguments"
        own = [event for event in events if getattr(event, "output_index", None) == number]
        told = "".join(event.delta for event in own if event.type == f"response.{name}.delta")
        assert told == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
    return events, response


def comparable(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output without its random names."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    options = {**GREEDY, "input": "How many?", "instructions": "Be brief.", "top_logprobs": 2}
    found = client.responses.create(**options)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    expected = chat(client, messages, logprobs=True, top_logprobs=2)
    assert found.output_text == expected.message.content
    values = checked(found)
    assert (values["status"], values["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (content,) = values["output"][0]["content"]
    assert content["logprobs"] == [each.model_dump() for each in expected.logprobs.content]
    usage = values["usage"]
    assert (usage["output_tokens"], usage["total_tokens"] - usage["input_tokens"]) == (24, 24)
    details = usage["output_tokens_details"]
    # The first token comes from the prompt, and each step adds one of the model's own.
    assert 0 < details["accepted_prediction_tokens"] < 23
    assert details["rejected_prediction_tokens"] > 0
    _, response = streamed(client, **options)
    assert comparable(response) == comparable(values)
    # The prompt of the second request is known.
    assert response["usage"].pop("input_tokens_details")["cached_tokens"] > 0
    del usage["input_tokens_details"]
    assert response["usage"] == usage


def test_a_conversation_is_sent_as_items(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "How many?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two.", "annotations": []}]},
        {"type": "message", "role": "user", "content": "Why not?"},
    ]
    told = ("How many?", "Two.", "Why not?")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, told, strict=True)]
    found = client.responses.create(input=items, **GREEDY)
    assert found.output_text == chat(client, messages).message.content


def test_an_output_that_follows_a_schema(client: openai.OpenAI) -> None:
    kind: Any = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    found = client.responses.create(
        input="Which digit?", text={"format": kind}, **{**GREEDY, "max_output_tokens": 100}
    )
    assert found.status == "completed"
    assert set(json.loads(found.output_text)) == {"digit"}


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", max_output_tokens=0)
    assert refused.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi " * 2000, stream=True)
    assert refused.value.param == "input"


def test_a_text_and_its_calls_are_one_message() -> None:
    """As the model wrote them, and as a chat has them."""
    texts = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Let me see."}]
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"]
    result = {"type": "function_call_output", "call_id": "a", "output": "1"}
    asked, _ = read_response({"model": MODEL, "input": [*texts, *calls, result]})
    (found,) = asked.inputs
    told = [
        {"id": each["call_id"], "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for each in calls
    ]
    tool = {"role": "tool", "content": "1", "tool_call_id": "a"}
    messages = [texts[0], {**texts[1], "tool_calls": told}, tool]
    assert found["messages"] == read_chat({"messages": messages}).inputs[0]["messages"]


def test_null_is_absent_inside_a_field() -> None:
    body = {"model": MODEL, "input": "Hi", "reasoning": {"effort": None, "summary": None}}
    assert read_response(body)[0] == read_response({"model": MODEL, "input": "Hi"})[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: must be text or a list with at least one item, got null"),
        ({"input": []}, "input: must be text or a list with at least one item, got []"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            r"input[0]: must be a message or an item of the type ",
        ),
        ({"input": [{"role": "king", "content": "Hi"}]}, "input[0].role: must be one of system, "),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'input[0].content[0]: must be a text such as {"type": "input_text"',
        ),
        ({"input": "Hi", "instructions": 3}, "instructions: must be text, got 3"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "["}], "instructions": "Hi"},
            "input[0].arguments: must be a JSON object as text",
        ),
        (
            {"input": [{"role": "assistant", "content": "a"}, {"type": "function_call", "arguments": "{}"}]},
            "input[1]: must be an object such as",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "a"}]},
            "input[0].call_id: must be the id",
        ),
        (
            {"input": "Hi", "previous_response_id": "resp_1"},
            "previous_response_id: is not supported, because",
        ),
        ({"input": "Hi", "background": True}, "background: is not supported by this server, got true"),
        ({"input": "Hi", "messages": []}, "messages: is not supported by this server, got []"),
        (
            {"input": "Hi", "include": ["file_search_call.results"]},
            "include: must have message.output_text.logprobs",
        ),
        (
            {"input": "Hi", "top_logprobs": 99},
            "top_logprobs: must be a whole number between 0 and 20, got 99",
        ),
        (
            {"input": "Hi", "tools": [{"type": "web_search"}]},
            "tools[0]: must be an object of the type function",
        ),
        (
            {"input": "Hi", "tools": [{"type": "function", "name": "a b"}]},
            "tools[0].name: must be 1 to 64 letters",
        ),
        (
            {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": {"name": "g"}},
            "tool_choice: must be none, auto, required, or of type function with the name of one of f, "
            'got "g"',
        ),
        ({"input": "Hi", "reasoning": {"effort": "low"}}, "reasoning: is not supported by this server"),
        ({"input": "Hi", "tools": 3}, "tools: must be a list of"),
        (
            {"input": "Hi", "text": {"format": {"type": "xml"}}},
            "text.format: must be an object whose type is",
        ),
        (
            {"input": "Hi", "text": {"format": {"type": "json_schema"}}},
            "text.format: must be an object such as",
        ),
        ({"input": "Hi", "text": []}, "text: must be an object such as"),
        ({"input": "Hi", "max_output_tokens": 2.5}, "max_output_tokens: must be a whole number of 32 bits"),
    ],
)
def test_bodies_that_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_response({"model": MODEL, **body}, HERMES)
    assert str(refused.value).startswith(message)

"""Tools with OpenAI's own client, a real tritonserver and a model that a grammar makes call them."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from runtime.core.bundle import CHAT_TEMPLATE_NAME, MANIFEST_NAME
from runtime.core.errors import RequestError
from tests.schemas import DIGIT, PERSON, WORD, record
from tests.triton_repo.openai.test_responses import checked as checked_response
from tests.triton_repo.openai.test_responses import comparable
from tests.triton_repo.openai.test_responses import streamed as streamed_response
from tests.triton_repo.servers import Server, openai_client
from triton_repo.openai.bodies import read_chat
from triton_repo.openai.tool_calls import FORMS, HERMES
from triton_repo.triton.tensors import MODEL

# Contexts of the tiny model are short, so it says only what the tools are called.
TEMPLATE = """\
{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}A:"""
# In the grammar of several schemas each has definitions of its own.
TREE = {"$defs": {"person": DIGIT}, **record(leaves={"$ref": "#/$defs/person"})}
PARAMETERS: dict[str, Any] = {
    "get_weather": record(city=WORD, unit={"enum": ["°C", "°F"]}),
    "add_person": {"$defs": {"person": PERSON}, **record(person={"$ref": "#/$defs/person"})},
    "grow": TREE,
    "now": None,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
QUESTION: Any = {"role": "user", "content": "How is the weather?"}
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": TOOLS, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def clients(
    tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, openai.OpenAI]]:
    """A client for every form of calls, all of one Triton server whose template takes tools."""
    directory = tmp_path_factory.mktemp("tools")
    bundle = directory / "bundle"
    shutil.copytree(tiny_bundle_dir, bundle)
    (bundle / CHAT_TEMPLATE_NAME).write_text(TEMPLATE, encoding="utf-8")
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    manifest["files"][CHAT_TEMPLATE_NAME] |= {"size": len(TEMPLATE.encode()), "sha256": digest}
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    server = Server(bundle, directory / "log")
    with ExitStack() as stack:
        # The template shows the first form.
        options = {name: () if name == "hermes" else ("--tool-parser", name) for name in FORMS}
        yield {name: stack.enter_context(openai_client(server.url, *options[name])) for name in FORMS}
    assert server.stop() == 0


def check(calls: Any, names: set[str]) -> None:
    """That these are calls of these tools, with arguments that follow their schemas."""
    for call in calls:
        assert call.function.name in names
        schema = PARAMETERS[call.function.name]
        jsonschema.validate(
            json.loads(call.function.arguments), schema or {"type": "object", "maxProperties": 0}
        )
    assert len({call.id for call in calls}) == len(calls)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[dict[str, str]], str]:
    """The text, the calls and the finish reason, put together from events."""
    text, reason = "", None
    calls: list[dict[str, str]] = []
    for event in client.chat.completions.create(stream=True, **options):
        (choice,) = event.choices
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert (part.index, part.type, part.function.arguments) == (len(calls), "function", "")
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            else:
                calls[part.index]["arguments"] += part.function.arguments
        reason = choice.finish_reason or reason
    assert reason is not None
    return text, calls, reason


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", [*PARAMETERS, "required"])
def test_calls_that_have_to_come(clients: dict[str, openai.OpenAI], form: str, choice: str) -> None:
    """Greedy and sampled, whole and streamed, in the form of each kind of model."""
    client = clients[form]
    named: Any = {"type": "function", "function": {"name": choice}}
    options = {**OPTIONS, "tool_choice": choice if choice == "required" else named}
    names = set(PARAMETERS) if choice == "required" else {choice}
    samplings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 4}]
    for sampling in samplings:
        (whole,) = client.chat.completions.create(messages=[QUESTION], **options, **sampling).choices
        calls = whole.message.tool_calls or []
        assert (whole.finish_reason, whole.message.content, len(calls)) == ("tool_calls", None, 1)
        check(calls, names)
        text, found, reason = streamed(client, messages=[QUESTION], **options, **sampling)
        assert (text, reason) == ("", "tool_calls")
        expected = [(call.function.name, call.function.arguments) for call in calls]
        assert [(call["name"], call["arguments"]) for call in found] == expected


def test_calls_of_the_responses_interface(clients: dict[str, openai.OpenAI]) -> None:
    """A call that has to come, whole and streamed, and the items that it leaves for the next request."""
    client = clients["hermes"]
    asked: list[Any] = [QUESTION]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named = {"type": "function", "name": "grow"}
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 300, "tools": tools}
    options |= {"tool_choice": named, "parallel_tool_calls": False}
    found = checked_response(client.responses.create(input=asked, **options))
    (call,) = found["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "grow", "completed")
    jsonschema.validate(json.loads(call["arguments"]), TREE)
    events, response = streamed_response(client, input=asked, **options)
    assert comparable(response) == comparable(found)
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 1
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    given: dict[str, Any] = {"model": MODEL, "temperature": 0}
    items: list[Any] = [*asked, call, output]
    answer = client.responses.create(input=items, max_output_tokens=16, **given)
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": call["call_id"], "type": "function", "function": function}]
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "Sunny."},
    ]
    (choice,) = client.chat.completions.create(messages=messages, max_tokens=16, **given).choices
    assert answer.output_text == choice.message.content


def test_calls_at_once(clients: dict[str, openai.OpenAI]) -> None:
    """A model that likes the separator calls again and again; the last call may be cut off."""
    bias = {"temperature": 1, "max_tokens": 200, "parallel_tool_calls": True}
    tools = [tool for tool in TOOLS if tool["function"]["name"] == "now"]
    counts = []
    for form, client in clients.items():
        for seed in range(3):
            options = {**OPTIONS, **bias, "tools": tools, "tool_choice": "required", "seed": seed}
            (choice,) = client.chat.completions.create(messages=[QUESTION], **options).choices
            calls: Any = choice.message.tool_calls
            counts.append(len(calls))
            if choice.finish_reason == "tool_calls":
                check(calls, {"now"})
            assert len({call.id for call in calls}) == len(calls)
            if form == "mistral":
                assert all(re.fullmatch("[a-z0-9]{9}", call.id) for call in calls)
    assert max(counts) > 1


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_with_results(clients: dict[str, openai.OpenAI], form: str) -> None:
    """The answer to a result, in which the model may call again, or may not."""
    client = clients[form]
    options = {**OPTIONS, "temperature": 0, "tool_choice": "required"}
    (first,) = client.chat.completions.create(messages=[QUESTION], **options).choices
    calls: Any = first.message.tool_calls
    (call,) = calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 °C"}
    messages: list[Any] = [QUESTION, first.message, result]
    for choice in ("auto", "none"):
        options = {**OPTIONS, "max_tokens": 20, "temperature": 0, "tool_choice": choice}
        (answer,) = client.chat.completions.create(messages=messages, **options).choices
        text, found, reason = streamed(client, messages=messages, **options)
        assert (answer.message.content, answer.finish_reason) == (text, reason)
        assert (answer.message.tool_calls, found) == (None, [])


def test_what_the_template_gets() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": "ü"}'}}
    messages: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]},
    ]
    (inputs,) = read_chat({"messages": messages, "tools": TOOLS}, HERMES).inputs
    assert json.loads(inputs["template_options"]) == {"tools": TOOLS}
    _, assistant, result = json.loads(inputs["messages"])
    parsed = {**call, "function": {"name": "now", "arguments": {"a": "ü"}}}
    assert assistant == {"role": "assistant", "content": "", "name": None, "tool_calls": [parsed]}
    assert result == {"role": "tool", "content": "12", "name": None, "tool_call_id": "1"}
    assert "guided_decoding_guide" not in inputs
    for absent in ({}, {"id": None}):
        nameless = {**messages[1], "tool_calls": [{**absent, "function": call["function"]}]}
        (inputs,) = read_chat({"messages": [QUESTION, nameless]}, HERMES).inputs
        assert json.loads(inputs["messages"])[1]["tool_calls"][0]["id"] == ""
    (inputs,) = read_chat({"messages": messages, "tools": TOOLS, "tool_choice": "none"}, HERMES).inputs
    assert "template_options" not in inputs


@pytest.mark.parametrize("kind", [{}, {"type": "object"}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_their_schema_says(kind: dict[str, Any]) -> None:
    parameters = {**kind, "properties": {"x": DIGIT}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (inputs,) = read_chat({"messages": [QUESTION], "tools": tools, "tool_choice": "required"}, HERMES).inputs
    guide = inputs["guided_decoding_guide"].decode()
    schema, _ = json.JSONDecoder().raw_decode(guide, guide.index("%json ") + len("%json "))
    assert (schema["type"], schema["properties"]) == ("object", {"x": DIGIT})


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tools": "x"},
            'tools: must be a list of functions|tools: must be a list of at most 128 functions, got "x"',
        ),
        ({"tools": [FUNCTION] * 129}, "tools: must be a list of at most 128 functions"),
        ({"tools": [FUNCTION] * 2}, "tools: must have different names"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: must be an object of the type function"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: must be an object with a name, got null"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r'tools\[0\].function.name: must be 1 to 64 letters, .*, got "a b"',
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            r"tools\[0\].function.parameters: must be a JSON schema, got \[\]",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            r'tools\[0\].function.parameters.type: must be object, got "array"',
        ),
        ({"tool_choice": "required"}, 'tool_choice: needs tools, got "required"'),
        (
            {"tools": [FUNCTION], "tool_choice": "any"},
            "tool_choice: must be none, auto, required, or of type function",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice: must be none, auto, required, or of type function",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format: must not be given where a tool has to be called",
        ),
        (
            {"messages": [QUESTION, {"role": "tool", "content": "x"}]},
            r"messages\[1\].tool_call_id: must be the id",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            r"messages\[0\].tool_calls\[0\]: must be an object such as",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}
                ]
            },
            r"messages\[0\].tool_calls\[0\].function.arguments: must be a JSON object as text, got",
        ),
    ],
)
def test_tools_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_chat({"messages": [QUESTION], **fields}, HERMES)


def test_models_without_tools(clients: dict[str, openai.OpenAI], server: Server) -> None:
    """A template that takes none, a form that is not known, and a tool whose schema cannot be followed."""
    expected = r"^tools: are not supported: the model's chat template takes none, or .*; if .*--tool-parser$"
    with pytest.raises(RequestError, match=expected):
        read_chat({"messages": [QUESTION], "tools": TOOLS})
    with openai_client(server.url, "--tool-parser", "llama3") as client:
        with pytest.raises(openai.BadRequestError, match="chat template takes no tools") as refused:
            client.chat.completions.create(messages=[QUESTION], **OPTIONS)
        assert refused.value.param == "tools"
    function = {"name": "f", "parameters": record(words={"type": "array", "uniqueItems": True})}
    options = {**OPTIONS, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        clients["hermes"].chat.completions.create(messages=[QUESTION], **options)
    assert refused.value.param == "tools"

"""Requests of OpenAI's interface: what a Triton model is asked, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import RequestError
from triton_repo.openai.bodies import read_chat, read_completion

USER = {"role": "user", "content": "How many?"}


def test_defaults() -> None:
    (chat,) = read_chat({"model": "x", "messages": [USER]}).inputs
    assert json.loads(chat.pop("messages")) == [{**USER, "name": None}]
    assert chat == {
        "temperature": 1.0,
        "stream": False,
        "return_log_probs": False,
    }
    (completion,) = read_completion({"prompt": "How"}).inputs
    assert completion == {**chat, "text_input": b"How", "raw": True, "max_tokens": 16}


def test_every_option() -> None:
    sampling = {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "top_k": 5}
    sampling |= {"presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.25}
    asked = read_chat(
        {
            "messages": [{"role": "developer", "content": "Be brief."}, USER],
            **sampling,
            "max_tokens": None,
            "max_completion_tokens": 7,
            "stop": "\n",
            "seed": 2**64 - 1,
            "n": 2,
            "logit_bias": {"17": -2.5},
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
            "user": "me",
            "metadata": {"a": "b"},
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
        },
    )
    first, second = asked.inputs
    messages = [{"role": "system", "content": "Be brief.", "name": None}, {**USER, "name": None}]
    assert first == {
        **sampling,
        "messages": json.dumps(messages).encode(),
        "template_options": b'{"enable_thinking": false}',
        "max_tokens": 7,
        "stop_words": [b"\n"],
        "seed": 2**64 - 1,
        "logit_bias": '{"17": -2.5}',
        "stream": True,
        "return_log_probs": True,
    }
    assert second == {**first, "seed": 0}
    assert (asked.num_choices, asked.include_usage, asked.log_probs) == (2, True, True)


def test_values_at_the_edges_of_openais_schema() -> None:
    options = {"seed": -1, "top_p": 0, "n": 2, "stream": True, "stream_options": {"include_usage": None}}
    asked = read_chat({"messages": [USER], **options})
    assert [inputs["seed"] for inputs in asked.inputs] == [2**64 - 1, 0]
    assert 0 < np.float32(asked.inputs[0]["top_p"]) < 1e-6
    assert not asked.include_usage


SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            json.dumps(SCHEMA, ensure_ascii=False),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"structured_outputs": {"json": "{}"}}, "json_schema", "{}"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json", ""),
        ({"structured_outputs": {"regex": "[ab]"}}, "regex", "[ab]"),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, "choice", '["ä", "b"]'),
        ({"structured_outputs": {"grammar": "start: A"}}, "ebnf_grammar", "start: A"),
    ],
)
def test_what_the_output_has_to_be(fields: dict[str, Any], kind: str, text: str) -> None:
    for asked in (read_chat({"messages": [USER], **fields}), read_completion({"prompt": "a", **fields})):
        (inputs,) = asked.inputs
        assert inputs["guided_decoding_guide_type"] == kind
        assert inputs["guided_decoding_guide"] == text.encode()
        assert asked.guide_field == next(iter(fields))


def test_prompts_and_choices() -> None:
    asked = read_completion({"prompt": ["a", "b"], "n": 2, "top_k": -1, "logprobs": 0, "stop": ["x", "y"]})
    assert [each["text_input"] for each in asked.inputs] == [b"a", b"a", b"b", b"b"]
    assert {each["top_k"] for each in asked.inputs} == {0}
    assert asked.log_probs


def test_token_ids() -> None:
    for prompt, expected in (([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])):
        asked = read_completion({"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0})
        assert [each["input_ids"] for each in asked.inputs] == expected
        assert (asked.echo, asked.log_probs, asked.num_top) == (True, True, 1)
        for each in asked.inputs:
            assert (each["max_tokens"], each["top_log_probs"], each["prompt_log_probs"]) == (0, 1, True)
            assert "raw" not in each
    mixed = read_completion({"prompt": ["a", [5]], "add_special_tokens": False}).inputs
    assert mixed[0].items() >= {"text_input": b"a", "raw": True, "add_special_tokens": False}.items()
    assert "add_special_tokens" not in mixed[1]


def test_an_assistant_without_content() -> None:
    (asked,) = read_chat({"messages": [USER, {"role": "assistant", "content": None}, USER]}).inputs
    assert json.loads(asked["messages"])[1]["content"] == ""


def test_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (asked,) = read_chat({"messages": [{"role": "user", "content": parts}]}).inputs
    assert json.loads(asked["messages"])[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, r"messages: must be a list with at least one message, got \[\]"),
        ({"messages": "x"}, 'messages: must be a list with at least one message, got "x"'),
        ({"messages": ["x"]}, r'messages\[0\]: must be an object with role and content, got "x"'),
        ({"messages": [{"role": "critic", "content": "x"}]}, r"messages\[0\].role: must be one of system"),
        ({"messages": [{"role": [], "content": "x"}]}, r"messages\[0\].role: must be one of .*, got \[\]"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: must be text, or .*, got null"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content: must be text, or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            r"messages\[0\].content: must be text, or a list of parts .*image_url",
        ),
        (
            {"messages": [USER, {"role": "user", "content": "", "tool_calls": [{}]}]},
            r"messages\[1\].tool_calls: is not supported by this server",
        ),
        ({"messages": [{**USER, "content": "\ud800"}]}, "messages: must be valid Unicode, got a lone surr"),
        ({"temperature": "hot"}, 'temperature: must be a number, got "hot"'),
        ({"response_format": "json"}, "response_format: must be an object whose type is one of text, json_o"),
        ({"response_format": {"type": "xml"}}, "response_format: must be an object whose type is one of"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x: is not known"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be an object such"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            'response_format.json_schema.strict: must be true or false, got "yes"',
        ),
        ({"structured_outputs": {}}, "structured_outputs: must be an object with one of json, json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: must be an object wi"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs: must be an object with one"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object: must be true, got 1"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex: must be text, got 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs: must not be given together with response_format",
        ),
        ({"temperature": True}, "temperature: must be a number, got true"),
        ({"max_tokens": 1.5}, "max_tokens: must be a whole number of 32 bits, got 1.5"),
        ({"max_tokens": 2**31}, "max_tokens: must be a whole number of 32 bits, got 2147483648"),
        ({"stream": "yes"}, 'stream: must be true or false, got "yes"'),
        ({"stream": 1}, "stream: must be true or false, got 1"),
        (
            {"seed": 2**64},
            "seed: must be a whole number between -2.63 and 2.64 - 1, got 1844",
        ),
        ({"n": 0}, "n: must be a whole number of at least 1, got 0"),
        ({"n": 33}, "n: times the number of prompts must be at most 32, got 33"),
        ({"stop": 3}, "stop: must be a string or a list of strings, none of them empty, got 3"),
        ({"stop": ""}, 'stop: must be a string or a list of strings, none of them empty, got ""'),
        ({"stop": ["a", ""]}, r'stop: must be a string or a list of strings, none of them empty, got \["a"'),
        ({"logit_bias": []}, r"logit_bias: must be a JSON object of token ids and numbers, got \[\]"),
        ({"stream_options": {}}, "stream_options: needs stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options: must be an object such as"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage: must be true or false, got 1",
        ),
        ({"top_logprobs": 5}, "top_logprobs: needs logprobs to be true, got 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be a whole number between 0 and 20"),
        ({"logprobs": 1}, "logprobs: must be true or false, got 1"),
        ({"reasoning_effort": "high"}, 'reasoning_effort: is not supported by this server, got "high"'),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs: must be a JSON object, got 1"),
    ],
)
def test_bad_chats(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_chat({"messages": [USER], **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt: must be a string, a list of token ids, or a list of either, got null"),
        ({"prompt": []}, "prompt: must be a string, a list of token ids"),
        ({"prompt": [1, -2]}, r"prompt: must be a string, a list of token ids, .*, got \[1, -2\]"),
        ({"prompt": [1, True]}, r"prompt: must be a string, a list of token ids, .*, got \[1, true\]"),
        ({"prompt": [[1], []]}, r"prompt: must be a string, a list of token ids"),
        ({"prompt": [1, "x"]}, r"prompt: must be a string, a list of token ids"),
        ({"logprobs": 21}, "logprobs: must be a whole number between 0 and 20, got 21"),
        ({"echo": 1}, "echo: must be true or false, got 1"),
        ({"echo": True, "stream": True}, "echo: must be false in a stream, got true"),
        ({"prompt": ["x"] * 9, "n": 4}, "n: times the number of prompts must be at most 32, got 36"),
        ({"max_completion_tokens": 5}, "max_completion_tokens: is not supported by this server, got 5"),
    ],
)
def test_bad_completions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_completion({"prompt": "x", **fields})

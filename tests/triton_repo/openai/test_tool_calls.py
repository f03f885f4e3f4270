"""Calls of tools in texts, whatever the parts in which a text comes."""

import json

import numpy as np
import pytest

from triton_repo.openai.tool_calls import (
    FORMS,
    HERMES,
    LLAMA3,
    MISTRAL,
    Part,
    ToolForm,
    ToolParser,
    form_of_template,
)

NAMES = ("get_weather", "add")
WEATHER = '{"city": "Köln \\" {}", "days": [1, {"a": "}"}]}'
Calls = list[tuple[str, str]]
TEXTS: list[tuple[ToolForm, str, str, Calls]] = [
    (HERMES, "Just <text>, <tool and {}.", "Just <text>, <tool and {}.", []),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "Let me see.\n",
        [("get_weather", WEATHER)],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1} , "name": "add"}</tool_call>\n'
        '<tool_call>{"name": "add"}</tool_call>\nDone',
        "Done",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    (HERMES, "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    (
        HERMES,
        '<tool_call>{"name": "sub", "arguments": {}}',
        '<tool_call>{"name": "sub", "arguments": {}}',
        [],
    ),
    (HERMES, '<tool_call>{"name": "add" 1}', '<tool_call>{"name": "add" 1}', []),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (HERMES, "<tool_call>\n</tool_call> Hm", "<tool_call>\n</tool_call> Hm", []),
    *(
        (HERMES, f'<tool_call>{{"name": "add"}}</tool_call>{rest}', rest, [("add", "{}")])
        for rest in ("<tool_call></tool_call>", "<tool_call></tool")
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 2}, "name": "add" </tool_call>Done',
        "Done",
        [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}\n', "", [("add", '{"a": 1}')]),
    *(
        (form, text, text, [])
        for form in (HERMES, LLAMA3, MISTRAL)
        for arguments in ('"{\\"a\\": 1}"', "null", "[1]")
        for text in [f'{form.marker}{{"name": "add", "{form.arguments}": {arguments}}} no object']
    ),
    (LLAMA3, f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "arguments": {"a": 2}}',
        "",
        [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    (
        LLAMA3,
        '{"name": "add", "parameters": {"a": 1}; {"name": "add", "parameters": {"a": 2}',
        "",
        [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    (
        LLAMA3,
        '{"name": "add", "parameters": {"a": 1}, "arguments": {"a": 2}}',
        "",
        [("add", '{"a": 1}')],
    ),
    (LLAMA3, ' {"answer": 42}', ' {"answer": 42}', []),
    (LLAMA3, 'So {"name": "add"}', 'So {"name": "add"}', []),
    (LLAMA3, "  ", "  ", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    (MISTRAL, f'[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [("get_weather", WEATHER)]),
    (MISTRAL, ' [{"name": "add", "arguments": {}}]', "", [("add", "{}")]),
    (MISTRAL, " [TOOL", " [TOOL", []),
    (MISTRAL, "[]", "[]", []),
    (MISTRAL, "[TOOL_CALLS] [] Hm", "[TOOL_CALLS] [] Hm", []),
    (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
    (MISTRAL, "Hi [TOOL_CA", "Hi [TOOL_CA", []),
]


def read(parser: ToolParser, parts: list[str]) -> tuple[str, Calls]:
    """The text and the calls, put together from the parts of the answer."""
    found: list[Part] = [part for text in parts for part in parser.feed(text)]
    found += parser.end()
    calls: Calls = []
    for part in found:
        if part.name is not None:
            assert part.index == len(calls)
            assert part.identifier
            calls.append((part.name, ""))
        if part.index is not None:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.text
    assert parser.num_calls == len(calls)
    return "".join(part.text for part in found if part.index is None), calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_and_the_rest(form: ToolForm, text: str, content: str, calls: Calls) -> None:
    random = np.random.default_rng(0)
    assert read(ToolParser(form, NAMES), [text]) == (content, calls)
    assert read(ToolParser(form, NAMES), list(text)) == (content, calls)
    for _ in range(20):
        cuts = sorted(random.integers(0, len(text) + 1, 4).tolist())
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(ToolParser(form, NAMES), parts) == (content, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('<tool_call>{"name": "add", "argu') == []
    first, second = parser.feed('ments": {"a": 1')
    assert (first.name, first.index, second.text) == ("add", 0, '{"a": 1')
    assert parser.feed('2, "b') == [Part('2, "b', 0)]
    assert parser.feed('": 3}') == [Part('": 3}', 0)]
    assert parser.feed("}</tool_call>") + parser.end() == []


def test_one_call_where_they_may_not_be_parallel() -> None:
    for form, text, _, calls in TEXTS:
        found = read(ToolParser(form, NAMES, is_parallel=False), [text])
        assert found[1] == calls[:1]


def test_a_second_call_that_was_cut_off_is_no_text_where_they_may_not_be_parallel() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = call + '\n<tool_call>\n{"name": "add", "argum'
    assert read(ToolParser(HERMES, NAMES, is_parallel=False), [text]) == ("", [("add", "{}")])


def test_forms_of_templates() -> None:
    assert form_of_template("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert form_of_template("'[TOOL_CALLS] ['") is MISTRAL
    assert form_of_template('Environment: ipython ... {"name": , "parameters": }') is LLAMA3
    assert form_of_template("{{ messages }}") is None
    assert set(FORMS) == {"hermes", "llama3", "mistral"}

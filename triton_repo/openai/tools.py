"""What the output of a request has to be: structured outputs, and the tools that the model may call.

``response_format`` is OpenAI's field, ``structured_outputs`` vLLM's. A request's tools decide what the chat
template is told and what the model may write.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from runtime.core.errors import RequestError
from runtime.core.options import CHOICE, EBNF, JSON, JSON_FORM, JSON_SCHEMA, REGEX
from runtime.core.prompts import encode_utf8
from triton_repo.openai.tool_calls import HERMES, LLAMA3, ToolForm
from triton_repo.web.json_body import BOOL, SHOWN, TEXT, Kind, shown

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
FORMATS = ("text", "json_object", "json_schema")
# The fields of ``structured_outputs``, with the type of guide that each is for the Triton model.
GUIDES = {"json": JSON_SCHEMA, "json_object": JSON, "regex": REGEX, "choice": CHOICE, "grammar": EBNF}
CONTENTS = {
    "json": Kind(str | dict, "a JSON schema, as an object or as text"),
    "choice": Kind(list, "a list of texts"),
}
OPTIONAL_TEXT, OPTIONAL_BOOL = Kind(str | None, TEXT.words), Kind(bool | None, BOOL.words)


@dataclass(frozen=True)
class Guide:
    """kind, text: as of ``runtime.decode.grammar.Grammar``; field: that of the body, for errors"""

    kind: str
    text: str
    field: str

    def inputs(self) -> dict[str, Any]:
        """Those of the Triton model. Raises RequestError for text without a UTF-8 form."""
        text = encode_utf8(self.field, self.text)
        return {"guided_decoding_guide_type": self.kind, "guided_decoding_guide": text}


def read_guide(response_format: Any, structured: Any) -> Guide | None:
    """The guide of two fields of a body, each of which may be absent (None). Raises RequestError."""
    found = None if response_format is None else _of_format(response_format)
    if structured is None:
        return found
    if found is not None:
        raise RequestError(f"must not be given together with {RESPONSE_FORMAT}", field=STRUCTURED_OUTPUTS)
    return _of_structured(structured)


def _of_format(value: Any) -> Guide | None:
    form = value.get("type") if isinstance(value, dict) else None
    if form not in FORMATS:
        expected = f"an object whose type is one of {', '.join(FORMATS)}"
        raise RequestError(f"must be {expected}, got {shown(value)}", field=RESPONSE_FORMAT)
    others = value.keys() - {"type", *(["json_schema"] if form == "json_schema" else [])}
    if others:
        raise RequestError(
            f"is not known, got {shown(value)}", field=f"{RESPONSE_FORMAT}.{min(others)[:SHOWN]}"
        )
    if form == "text":
        return None
    if form == "json_object":
        return Guide(JSON, "", RESPONSE_FORMAT)
    where, given = f"{RESPONSE_FORMAT}.json_schema", value.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        expected = 'an object such as {"name": "answer", "schema": {"type": "object"}}'
        raise RequestError(f"must be {expected}, got {shown(given)}", field=where)
    for name, kind in (("name", TEXT), ("description", OPTIONAL_TEXT), ("strict", OPTIONAL_BOOL)):
        if name in given:
            kind.read(f"{where}.{name}", given[name])
    # The schema is followed whether the client calls it strict or not.
    return Guide(JSON_SCHEMA, json.dumps(given["schema"], ensure_ascii=False), RESPONSE_FORMAT)


def _of_structured(value: Any) -> Guide:
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or given.keys() - GUIDES.keys():
        expected = f"an object with one of {', '.join(GUIDES)}"
        raise RequestError(f"must be {expected}, got {shown(value)}", field=STRUCTURED_OUTPUTS)
    ((name, content),) = given.items()
    where = f"{STRUCTURED_OUTPUTS}.{name}"
    if name == "json_object":
        if content is not True:
            raise RequestError(f"must be true, got {shown(content)}", field=where)
        return Guide(GUIDES[name], "", STRUCTURED_OUTPUTS)
    CONTENTS.get(name, TEXT).read(where, content)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return Guide(GUIDES[name], text, STRUCTURED_OUTPUTS)


# OpenAI's limits.
MAX_TOOLS = 128
NAME = Kind(
    Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")],
    "1 to 64 letters, digits, dashes and underscores",
)
NONE, AUTO, REQUIRED = "none", "auto", "required"
TOOLS, TOOL_CHOICE = "tools", "tool_choice"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """The tools of a request, as its body has them, and which of them the model has to call.

    called: names of the tools one of which has to be called; empty where the model may choose
    """

    tools: Sequence[dict[str, Any]]
    called: tuple[str, ...]
    is_parallel: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)

    def guide(self, form: ToolForm | None) -> Guide | None:
        """The grammar of the calls that have to come; None where none has to."""
        if not self.called or form is None:
            return None
        functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        rules = []
        for index, name in enumerate(self.called):
            schema = functions[name].get("parameters") or NO_PARAMETERS
            begin = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
            content = json.dumps({**schema, "type": "object", "x-guidance": JSON_FORM}, ensure_ascii=False)
            rules.append(f'call{index}: {json.dumps(begin)} %json {content} "}}"')
        call = " | ".join(f"call{index}" for index in range(len(self.called)))
        rules = [f"call: {call}", *rules]
        if form is HERMES:
            one = 'wrapped: "<tool_call>\\n" call "\\n</tool_call>"'
            rules = [_list("wrapped", '"\\n"', self.is_parallel), one, *rules]
        elif form is LLAMA3:
            rules = [_list("call", '"; "', self.is_parallel), *rules]
        else:
            rules = ['start: "[" list "]"', _list("call", '", "', self.is_parallel, "list"), *rules]
        return Guide(EBNF, "\n".join(rules), TOOLS)


def _list(rule: str, separator: str, is_parallel: bool, name: str = "start") -> str:
    return f"{name}: {rule} ({separator} {rule})*" if is_parallel else f"{name}: {rule}"


def read_tools(tools: Any, choice: Any, parallel: bool | None, parser: ToolForm | None) -> Tools | None:
    """Three fields of a body, each of which may be absent (None); None where no tool may be called.

    parser: the form in which the model writes calls; None if it is not known
    Raises RequestError.
    """
    if not tools:
        if tools not in (None, []):
            raise RequestError(f"must be a list of functions, got {shown(tools)}", field=TOOLS)
        if choice not in (None, NONE, AUTO):
            raise RequestError(f"needs tools, got {shown(choice)}", field=TOOL_CHOICE)
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RequestError(
            f"must be a list of at most {MAX_TOOLS} functions, got {shown(tools)}", field=TOOLS
        )
    for index, tool in enumerate(tools):
        _check_tool(f"{TOOLS}[{index}]", tool)
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"must have different names, got {shown(names)}", field=TOOLS)
    called = _called(choice, names)
    if called is None:
        return None
    if parser is None:
        problem = "are not supported: the model's chat template takes none, or its form of calls is not known"
        raise RequestError(f"{problem}; if it takes tools, start the server with --tool-parser", field=TOOLS)
    return Tools(tools, tuple(called), parallel is not False)


def _called(choice: Any, names: list[str]) -> list[str] | None:
    """Of the tools one of which has to be called, their names; None where none may be called."""
    if choice == NONE:
        return None
    if choice in (None, AUTO):
        return []
    if choice == REQUIRED:
        return names
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names or choice.get("type") != "function":
        known = f"none, auto, required, or of type function with the name of one of {', '.join(names)}"
        got = choice if name is None or name in names else name
        raise RequestError(f"must be {known}, got {shown(got)}", field=TOOL_CHOICE)
    return [name]


def _check_tool(where: str, tool: Any) -> None:
    """Raises RequestError for what is no function."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"must be an object of the type function, got {shown(tool)}", field=where)
    where = f"{where}.function"
    function = Kind(dict, "an object with a name").read(where, tool.get("function"))
    NAME.read(f"{where}.name", function.get("name"))
    OPTIONAL_TEXT.read(f"{where}.description", function.get("description"))
    parameters = Kind(dict | None, "a JSON schema").read(f"{where}.parameters", function.get("parameters"))
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(f"must be object, got {shown(kind)}", field=f"{where}.parameters.type")


def read_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """An assistant's earlier calls, with their arguments as objects, which chat templates expect.

    Raises RequestError.
    """
    Kind(list, "a list of calls").read(where, calls)
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = 'an object such as {"id": "1", "function": {"name": "f", "arguments": "{}"}}'
            raise RequestError(f"must be {expected}, got {shown(call)}", field=f"{where}[{index}]")
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            problem = f"must be a JSON object as text, got {shown(function.get('arguments'))}"
            raise RequestError(problem, field=f"{where}[{index}].function.arguments")
        named = {"name": function["name"], "arguments": arguments}
        found.append({"id": str(call.get("id") or ""), "type": "function", "function": named})
    return found

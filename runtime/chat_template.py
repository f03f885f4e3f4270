"""Conversations to prompts, with the chat template of a bundle, as Transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.core.bundle import CHAT_TEMPLATE_NAME, SPECIAL_TOKENS_NAME, Bundle
from runtime.core.errors import BundleError, RequestError


class ChatTemplate:
    """A template in Jinja, which runs in a sandbox: it sees what it is given and changes none of it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """special_tokens: such as ``{"eos_token": "</s>"}``

        Raises BundleError for what is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControls, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        try:
            self._template = environment.from_string(source)
            # Whether it says in a prompt which tools there are.
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise BundleError(f"{CHAT_TEMPLATE_NAME} is no template: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """The template of a bundle; None for a model without one. Raises BundleError."""
        if CHAT_TEMPLATE_NAME not in Bundle.load(directory, verify=False).manifest.files:
            return None
        try:
            source = (directory / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
            special_tokens = json.loads((directory / SPECIAL_TOKENS_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{directory}: the chat template cannot be read: {error}") from error
        return cls(source, special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The prompt of a conversation, up to where the model's next answer begins.

        messages: each with ``role`` and ``content``; keys whose value is None count as absent
        options: further variables of the template, such as ``enable_thinking``
        Raises RequestError for what the template refuses or cannot render.
        """
        conversation = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {"tools": None, "documents": None, **self._special_tokens, **(options or {})}
        variables |= {"messages": conversation, "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template raises what any program may
            message = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses them: {message}", field="messages"
            ) from error


class _Generation(Extension):
    """The tags around what the model writes, ``{% generation %}``, which mark it in training only."""

    tags = {"generation"}  # noqa: RUF012 (of a class of Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)

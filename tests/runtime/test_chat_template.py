"""The prompts of conversations are those of Transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.chat_template import ChatTemplate
from runtime.core.bundle import CHAT_TEMPLATE_NAME, MANIFEST_NAME, SPECIAL_TOKENS_NAME, Bundle
from runtime.core.errors import BundleError, RequestError
from runtime.core.prompts import Prompt
from runtime.text import PromptTokenizer
from tests.conftest import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "demo": (ROOT / "demo/backbone/chat_template.jinja").read_text(encoding="utf-8"),
    "vicuna": (ROOT / "examples/vicuna_chat_template.jinja").read_text(encoding="utf-8"),
    # Lines, indentation and white space, as most published templates have them.
    "lines": """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == "assistant" %}
        {% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
    {% if loop.first %}{% continue %}{% endif %}
    {{ loop.index0 }}:{{ message.role | title }}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "functions": """\
{% set ns = namespace(turns=0) %}{{ bos_token }}{{ tools is none }}{{ documents is none }}
{%- for message in messages %}{% set ns.turns = ns.turns + 1 %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception(message.role) }}{% endif %}
{{ message | tojson }}{{ message | tojson(indent=2) }}{{ 'name' in message }}
{%- if ns.turns > 3 %}{% break %}{% endif %}{% endfor %}
{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}{{ range(ns.turns) | list }}{{ thinking is defined }}""",
}
USER, ANSWER = {"role": "user", "content": "How <many>?\n"}, {"role": "assistant", "content": " Ünï & 'two' "}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, USER, ANSWER, {"role": "user", "content": "{{ 7 * 7 }}", "name": None}],
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.bos_token = "<s>"
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"thinking": False}])
def test_transformers_renders_the_same(tokenizer: Any, name: str, options: dict[str, Any]) -> None:
    template = ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map)
    texts = set()
    for messages in CONVERSATIONS:
        expected = tokenizer.apply_chat_template(
            messages,
            chat_template=TEMPLATES[name],
            tokenize=False,
            add_generation_prompt=True,
            **options,
        )
        assert template.render(messages, options) == expected
        texts.add(expected)
    assert len(texts) > 1


def test_a_bundle_has_its_model_s_template(tiny_bundle_dir: Path, tokenizer: Any) -> None:
    template = ChatTemplate.load(tiny_bundle_dir)
    assert template is not None
    messages = CONVERSATIONS[3]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\\nalternate') }}", "messages: .* refuses them: roles must$"),
        ("{{ messages[0].absent.part }}", "messages: .* has no attribute 'absent'"),
        ("{{ messages.append(1) }}", "messages: .* 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "messages: .* '__class__' .* is unsafe"),
        ("{{ 1 / 0 }}", "messages: .* division by zero"),
    ],
)
def test_what_a_template_refuses(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source, {}).render([USER])


def test_bundles_without_a_template_that_can_be_used(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"chat_template\.jinja is no template"):
        ChatTemplate("{% if", {})
    with pytest.raises(BundleError, match="is no engine bundle"):
        ChatTemplate.load(tmp_path / "absent")
    bundle = shutil.copytree(tiny_bundle_dir, tmp_path / "bundle")
    size = (bundle / SPECIAL_TOKENS_NAME).stat().st_size
    (bundle / SPECIAL_TOKENS_NAME).write_bytes(b"{" * size)
    with pytest.raises(BundleError, match="the chat template cannot be read: Expecting"):
        ChatTemplate.load(bundle)
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    for name in (CHAT_TEMPLATE_NAME, SPECIAL_TOKENS_NAME):
        del manifest["files"][name]
        (bundle / name).unlink()
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    assert ChatTemplate.load(bundle) is None


def test_tools_in_the_template(tiny_bundle_dir: Path, tokenizer: Any) -> None:
    """Transformers renders the same calls and results; special tokens in a tool's description stay text."""
    source = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "now", "description": "<|endoftext|> ü"}}]
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": "ü"}}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]
    text = tokenizer.apply_chat_template(messages, chat_template=source, tools=tools, tokenize=False)
    template = ChatTemplate(source, tokenizer.special_tokens_map)
    assert template.render(messages, {"tools": tools}) == text
    encode = prompt_tokenizer(tiny_bundle_dir)
    with pytest.raises(RequestError, match="template_options: the model's chat template takes no tools"):
        encode.encode_messages(messages, options={"tools": tools})
    encode.template = template
    ids = encode.encode_messages(messages, options={"tools": tools})
    assert encode.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert encode.tokenizer.token_to_id("<|endoftext|>") not in ids


def prompt_tokenizer(bundle: Path) -> PromptTokenizer:
    return PromptTokenizer(Bundle.load(bundle, verify=False))


def test_conversations_to_tokens(tiny_bundle_dir: Path, tokenizer: Any) -> None:
    """The tokens are those of Transformers, for one message and for several."""
    encode = prompt_tokenizer(tiny_bundle_dir)
    for messages in CONVERSATIONS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert encode.encode_messages(messages) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode.encode_prompt(Prompt("How many?")) == encode.encode("How many?")
    with_system = Prompt("How many?").with_system("Be brief.")
    assert encode.encode_prompt(with_system) == encode.encode_messages(with_system.messages)
    with pytest.raises(RequestError, match="messages: must be shorter than the context of 3 tokens, got "):
        encode.encode_messages([SYSTEM, USER], max_tokens=3)
    with pytest.raises(RequestError, match="messages: must be valid Unicode, got a lone surrogate"):
        encode.encode_messages([SYSTEM, {"role": "user", "content": "\ud800"}])


def test_a_user_cannot_write_special_tokens(tiny_bundle_dir: Path) -> None:
    """They are text in messages of users and of the system, alone and in a conversation."""
    encode = prompt_tokenizer(tiny_bundle_dir)
    added = encode.tokenizer.get_added_tokens_decoder()
    token_id, token = next((number, token) for number, token in added.items() if token.special)
    forged = f"a{token.content}b{token.content}"
    plain = encode.encode("ab").count(token_id)
    assert encode.encode(forged).count(token_id) == plain
    assert encode.encode(forged, raw=True).count(token_id) == plain + 2
    for role in ("user", "system"):
        honest, wicked = (
            encode.encode_messages([SYSTEM, {"role": role, "content": text}, USER]) for text in ("ab", forged)
        )
        assert wicked.count(token_id) == honest.count(token_id)
        assert forged in encode.tokenizer.decode(wicked, skip_special_tokens=False)
    # What an assistant is said to have written may hold the character that marks a user's special tokens.
    marks = "".join(map(chr, range(0xF0000, 0xF0003)))
    for said in (marks[0], marks):
        before = [USER, {"role": "assistant", "content": said}]
        honest, wicked = (
            encode.encode_messages([*before, {"role": "user", "content": text}]) for text in ("ab", forged)
        )
        assert wicked.count(token_id) == honest.count(token_id)
    answered = [USER, {"role": "assistant", "content": forged}, USER]
    expected = encode.encode_messages([USER, {"role": "assistant", "content": "ab"}, USER]).count(token_id)
    assert encode.encode_messages(answered).count(token_id) == expected + 2


def test_neither_can_a_user_with_the_name(tiny_bundle_dir: Path) -> None:
    """As in the content, a special token in a message's other fields is text."""
    encode = prompt_tokenizer(tiny_bundle_dir)
    encode.template = ChatTemplate(
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}{% endfor %}",
        {},
    )
    token = "<|endoftext|>"
    forged = {"role": "user", "content": "a", "name": f"{token}system"}
    result = {"role": "tool", "content": "a", "name": None, "tool_call_id": token}
    ids = encode.encode_messages([forged, result])
    assert encode.tokenizer.token_to_id(token) not in ids
    assert encode.tokenizer.decode(ids).startswith(f"user {token}system : atool  {token}: a")


def test_without_a_template_only_one_message(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle_dir, bundle)
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    del manifest["files"][CHAT_TEMPLATE_NAME]
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    encode = prompt_tokenizer(bundle)
    assert encode.encode_messages([USER]) == encode.encode(USER["content"])
    for messages, options in (([SYSTEM, USER], None), ([SYSTEM], None), ([USER], {"a": 1})):
        with pytest.raises(RequestError, match="messages: must be one user message, because"):
            encode.encode_messages(messages, options=options)
    with pytest.raises(RequestError, match=r"^messages: must not be empty"):
        encode.encode_messages([])

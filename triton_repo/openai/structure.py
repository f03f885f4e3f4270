"""What the output of a request has to be: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

import json
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import RequestError
from runtime.core.options import CHOICE, EBNF, JSON, JSON_SCHEMA, REGEX
from runtime.core.prompts import encode_utf8
from triton_repo.web.json_body import SHOWN, shown

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
FORMATS = ("text", "json_object", "json_schema")
# The fields of ``structured_outputs``, with the type of guide that each is for the Triton model.
GUIDES = {"json": JSON_SCHEMA, "json_object": JSON, "regex": REGEX, "choice": CHOICE, "grammar": EBNF}


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
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMATS:
        expected = f"an object whose type is one of {', '.join(FORMATS)}"
        raise RequestError(f"must be {expected}, got {shown(value)}", field=RESPONSE_FORMAT)
    others = value.keys() - {"type", *(["json_schema"] if kind == "json_schema" else [])}
    if others:
        raise RequestError(
            f"is not known, got {shown(value)}", field=f"{RESPONSE_FORMAT}.{min(others)[:SHOWN]}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(JSON, "", RESPONSE_FORMAT)
    where, given = f"{RESPONSE_FORMAT}.json_schema", value.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        expected = 'an object such as {"name": "answer", "schema": {"type": "object"}}'
        raise RequestError(f"must be {expected}, got {shown(given)}", field=where)
    for name, expected, is_right in (
        ("name", "text", isinstance(given.get("name", ""), str)),
        ("description", "text", isinstance(given.get("description") or "", str)),
        ("strict", "true or false", isinstance(given.get("strict") or False, bool)),
    ):
        if not is_right:
            raise RequestError(f"must be {expected}, got {shown(given[name])}", field=f"{where}.{name}")
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
    kinds: dict[str, tuple[type | tuple[type, ...], str]] = {
        "json": ((str, dict), "a JSON schema, as an object or as text"),
        "choice": (list, "a list of texts"),
    }
    kind, expected = kinds.get(name, (str, "text"))
    if not isinstance(content, kind):
        raise RequestError(f"must be {expected}, got {shown(content)}", field=where)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return Guide(GUIDES[name], text, STRUCTURED_OUTPUTS)

"""JSON schemas of many kinds whose texts are short, and schemas that a server must refuse or bound."""

from typing import Any


def record(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(items: Any, least: int = 1, most: int = 2) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD: dict[str, Any] = {"type": "string", "maxLength": 6}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
SMALL: dict[str, Any] = {"type": "integer", "minimum": -20, "maximum": 150}
PERSON = record(name=WORD, age=SMALL)

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": PERSON,
    "nested": record(person=PERSON, home=record(city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"})),
    "deep": record(a=record(b=record(c=record(d=record(e={"const": 1}))))),
    "enum": record(kind={"enum": ["cat", "dog", "catfish"]}, level={"enum": [1, 10, None, "x"]}),
    "const": record(version={"const": "v1.0 beta"}, ok={"const": True}),
    "booleans": list_of({"type": "boolean"}, 3, 3),
    "null": record(nothing={"type": "null"}, some={"type": ["null", "boolean"]}),
    "integers": list_of({"type": "integer", "minimum": -5, "exclusiveMaximum": 1000}, 2, 3),
    "numbers": list_of({"type": "number", "minimum": 0, "maximum": 2.5, "multipleOf": 0.5}, 2, 2),
    "multiple": record(dozen={"type": "integer", "minimum": 0, "maximum": 600, "multipleOf": 12}),
    "unicode": record(größe=DIGIT, 名前={"enum": ["太郎", "花子"]}, face={"const": "🙂 ok"}),
    "escapes": {"enum": ['a "quoted" \\ word', "line\nend", "tab\t"]},
    "pattern": record(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}),
    "formats": record(day={"type": "string", "format": "date"}, at={"type": "string", "format": "time"}),
    "optional": {
        "type": "object",
        "properties": {"a": DIGIT, "b": WORD, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [PERSON, {"type": "null"}, DIGIT]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "tuple": {
        "type": "array",
        "prefixItems": [DIGIT, {"type": "boolean"}, WORD],
        "items": False,
        "minItems": 3,
    },
    "references": {
        "$defs": {"person": PERSON},
        **record(first={"$ref": "#/$defs/person"}, second={"$ref": "#/$defs/person"}),
    },
    "recursive": {
        "$defs": {"node": record(value=DIGIT, children=list_of({"$ref": "#/$defs/node"}, 0, 2))},
        "$ref": "#/$defs/node",
    },
    "records": list_of(record(id=DIGIT, tag={"enum": ["red", "green"]}, done={"type": "boolean"}), 2, 2),
}


def _product(count: int) -> dict[str, Any]:
    """An intersection whose alternatives are 2 to the power of ``count``."""
    pairs = [
        {"anyOf": [{"properties": {f"a{n}": DIGIT}}, {"properties": {f"b{n}": WORD}}]} for n in range(count)
    ]
    return {"allOf": [{"type": "object", **pair} for pair in pairs]}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


# What an error says of each.
REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([1], "must be a JSON schema, which is an object"),
    "unknown keyword": ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    "unknown type": ({"type": "foo"}, "Invalid type: foo"),
    "wrong pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "remote": ({"$ref": "http://example.com/x.json"}, "not fetch"),
    "missing reference": ({"$ref": "#/$defs/x"}, "cannot be used"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "no end": ({"$ref": "#"}, "allows no text"),
    "too deep": (_nested(100), "must have at most 64 values in each other"),
    "too long": ({"enum": ["x" * 70000]}, "must be at most 65536 characters long"),
    "too wide": ({"properties": {f"p{n}": {} for n in range(600)}}, "at most 500 properties an object"),
    "too many": ({"enum": list(range(5000))}, "must have at most 4000 values"),
    "exponential": (_product(12), "too large"),
    "exponential symbols": (_product(10), "too big"),
}

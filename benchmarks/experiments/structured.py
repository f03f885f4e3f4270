"""Generated JSON schemas: whether texts follow them and are plain decoding's, and how many tokens a step has.

    python -m benchmarks.experiments.structured --bundle build/demo/bundle --prompts demo/prompts.jsonl \\
        --schemas 200 --out build/structured

Every schema is asked for once greedily and once with a seed, at temperature 1, with drafts and without. The
same prompts are also answered freely. Writes structured.json with a row for every text, and structured.md.
"""

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts
from benchmarks.report import markdown_table, print_result, write_report
from runtime.core.bundle import PLAIN, Bundle
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.options import JSON_SCHEMA
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decoder import SpeculativeDecoder

NAMES = (
    *("name", "title", "quantity", "price", "is_available", "category", "tags", "created_at", "city"),
    *("customer_id", "items", "total_amount", "currency", "description", "status", "größe", "名前", "parent"),
)
WORDS = ("red", "green", "blue", "pending", "shipped", "EUR", "USD", "größer", "東京", "none of these")
DEPTH = 3
Schema = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.structured", __doc__)
    parser.add("--bundle", "--prompts", "--threads")
    parser.add("--schemas", type=at_least(1), default=200, help="their number (default 200)")
    parser.add("--max-new-tokens", type=at_least(1), default=400, help="of a text, at most (default 400)")
    parser.add("--out", help="directory of the report")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Decode all texts and write the report."""
    import jsonschema  # only for checks like this one

    random_numbers = random.Random(0)
    prompts = all_prompts(args.prompts, None)
    drafting = SpeculativeDecoder.from_bundle(args.bundle, num_threads=args.threads)
    plain = SpeculativeDecoder.from_bundle(args.bundle, method=PLAIN, num_threads=args.threads)
    rows = []
    for number in tqdm(range(args.schemas), desc="schemas", unit="schema"):
        schema = make_schema(random_numbers)
        question = prompts[number % len(prompts)].text
        ids = drafting.prompt_tokenizer.encode(f"{question} Answer as JSON.")
        grammar = Grammar(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
        for name, sampling in (("greedy", GREEDY), ("sampled", SamplingParams(temperature=1.0, seed=number))):
            options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling}
            text = decode(drafting, ids, grammar=grammar, **options)
            expected = decode(plain, ids, grammar=grammar, **options)
            free = decode(drafting, ids, **options)
            row: dict[str, Any] = {"schema": schema, "sampling": name, "text": text["text"]}
            row["is_complete"] = text["finish_reason"] == "stop"
            row["is_valid"] = row["is_complete"] and is_valid(jsonschema, text["text"], schema)
            row["is_equal"] = text["token_ids"] == expected["token_ids"]
            row |= {"tokens": text["tokens"], "steps": text["steps"]}
            row |= {"free_tokens": free["tokens"], "free_steps": free["steps"]}
            rows.append(row)
    found = {
        name: summary([row for row in rows if row["sampling"] == name]) for name in ("greedy", "sampled")
    }
    header = [
        "texts",
        "complete",
        "valid",
        "as plain decoding",
        "tokens a step",
        "without schema",
        "ratio",
        "ratio of complete texts",
    ]
    table = markdown_table(["", *header], [[name, *map(str, each.values())] for name, each in found.items()])
    report = {"summary": found, "rows": rows}
    bundle = Bundle.load(args.bundle, verify=False)
    write_report(args, "structured.json", report, bundle=bundle, texts={"structured.md": table + "\n"})
    print(table)
    print_result({f"{name} {key}": value for name, each in found.items() for key, value in each.items()})
    return 0


def decode(decoder: SpeculativeDecoder, ids: Sequence[int], **options: Any) -> dict[str, Any]:
    """The text, its tokens and how they came. The first token comes with the prompt and is no step's."""
    chunks = list(decoder.stream(ids, **options))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": tokens,
        "tokens": len(tokens) - 1,
        "steps": len(chunks) - 1,
        "finish_reason": chunks[-1].finish_reason,
    }


def is_valid(jsonschema: Any, text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the tokens a step of all texts together; also those of the texts that ended, if any did."""
    counts = {name: sum(row[f"is_{name}"] for row in rows) for name in ("complete", "valid", "equal")}
    found = _tokens_a_step(rows)
    if found is None:
        raise UserError("--prompts: every output ends with its first token, so there are no steps to count")
    ours, free = found
    rates = {"tokens_a_step": round(ours, 2), "free_tokens_a_step": round(free, 2)}
    ratios: dict[str, float | None] = {"ratio": round(ours / free, 2), "ratio_complete": None}
    complete = _tokens_a_step([row for row in rows if row["is_complete"]])
    if complete:
        ratios["ratio_complete"] = round(complete[0] / complete[1], 2)
    return {"texts": len(rows), **counts, **rates, **ratios}


def _tokens_a_step(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """With a schema and without; None where one of the two has no steps."""
    tokens, steps = (
        [sum(row[f"{kind}{what}"] for row in rows) for kind in ("", "free_")] for what in ("tokens", "steps")
    )
    return (tokens[0] / steps[0], tokens[1] / steps[1]) if all(steps) else None


def make_schema(random_numbers: random.Random) -> Schema:
    """An object of one to six properties, some of them objects and lists in turn, or of its own kind."""
    schema = _object(random_numbers, DEPTH)
    if random_numbers.random() < 0.15:
        part = {"$ref": "#/$defs/part"}
        schema["properties"]["parts"] = {"type": "array", "items": part, "maxItems": 1}
        own = {"id": {"enum": [1, 2]}, "parts": {"type": "array", "items": part, "maxItems": 1}}
        schema["$defs"] = {"part": _closed(own, ["id"])}
    return schema


def _object(random_numbers: random.Random, depth: int) -> Schema:
    names = random_numbers.sample(NAMES, random_numbers.randint(1, 6))
    properties = {name: _value(random_numbers, depth - 1) for name in names}
    return _closed(properties, [name for name in names if random_numbers.random() < 0.9])


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(random_numbers: random.Random, depth: int) -> Schema:
    pick = random_numbers.choice
    kind = pick(["text", "integer", "number", "enum", "boolean", "const", "date", "pattern", "any", "nested"])
    if kind == "nested" and depth > 0:
        if pick([True, False]):
            return _object(random_numbers, depth)
        items = _value(random_numbers, depth - 1)
        return {"type": "array", "items": items, "minItems": pick([0, 1, 2]), "maxItems": pick([2, 3])}
    simple: dict[str, Schema] = {
        "text": {"type": "string", "minLength": pick([0, 1]), "maxLength": pick([5, 12, 20])},
        "integer": {"type": "integer", "minimum": pick([-50, 0, 7]), "maximum": pick([10, 365, 20_000])},
        "number": {"type": "number", "minimum": 0, "maximum": 99.5, "multipleOf": pick([0.5, 0.25])},
        "enum": {"enum": random_numbers.sample([*WORDS, 1, None, True], pick([2, 4, 8]))},
        "boolean": {"type": "boolean"},
        "const": {"const": pick(WORDS)},
        "date": {"type": "string", "format": pick(["date", "time", "uuid"])},
        "pattern": {"type": "string", "pattern": pick(["^[A-Z]{3}-[0-9]{4}$", "^(a|bc){1,3}$"])},
    }
    if kind in simple:
        return simple[kind]
    return {"anyOf": [simple["text"], simple["integer"], {"type": "null"}]}


if __name__ == "__main__":
    raise SystemExit(main())

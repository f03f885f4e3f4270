"""Grammars: texts that follow them, the same with and without drafts, and clear limits."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.core.errors import RequestError
from runtime.core.token_tree import TokenTree
from runtime.decode import grammar as grammars
from runtime.decode.budget import FixedBudget
from runtime.decode.grammar import (
    CHOICE,
    EBNF,
    JSON,
    JSON_SCHEMA,
    REGEX,
    Grammar,
    GrammarCompiler,
    join_continuations,
)
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import Chunk
from runtime.decoder import SpeculativeDecoder
from runtime.serve.scheduler import Scheduler
from tests.batch_runs import decode_together
from tests.fakes import SAMPLING_SETTINGS, token_ids
from tests.schemas import REFUSED, SCHEMAS

QUESTION = "Mia has 3 boxes with 12 pencils each. How many pencils does she have? Answer as JSON."
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PHONE = Grammar(REGEX, r"[0-9]{3}-[0-9]{2}")
EXPRESSION = Grammar(EBNF, 'root ::= term ("+" term)? ";"\nterm ::= [0-9] | "(" root ")"')


def of_schema(schema: Any) -> Grammar:
    return Grammar(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def run(decoder: SpeculativeDecoder, grammar: Grammar | None, **options: Any) -> list[Chunk]:
    prompt = decoder.prompt_tokenizer.encode(QUESTION)
    return list(decoder.stream(prompt, grammar=grammar, **{"max_new_tokens": 200, **options}))


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


# Bytes that no text of these tests has. Longer tokens, each made of two others, take their places.
UNUSED = (*range(3), *range(0xF5, 0x100))
MERGES = (
    '{ "',
    '" :',
    ', "',
    '": "',
    '" }',
    "n a",
    "m e",
    "na me",
    "i d",
    "a g",
    "ag e",
    "1 2",
    "r u",
    "t ru",
)


@pytest.fixture(scope="module")
def merging(
    trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny model with a head, and a tokenizer whose tokens have up to four characters."""
    bundle = tmp_path_factory.mktemp("merging") / "bundle"
    shutil.copytree(make_tiny_bundle(trained_heads_dir / "ctc"), bundle)
    path = bundle / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    character_of = bytes_to_unicode()
    free = [vocab.pop(character_of[byte]) for byte in UNUSED]
    tokenizer["model"]["merges"] = [pair.split(" ") for pair in MERGES]
    vocab.update(zip((pair.replace(" ", "") for pair in MERGES), free, strict=True))
    # A bundle's files have the sizes that its manifest says.
    path.write_text(json.dumps(tokenizer).ljust(path.stat().st_size), encoding="ascii")
    return bundle


@pytest.fixture(scope="module")
def drafting(merging: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(merging, num_nodes=8, num_threads=1, verify=False)


@pytest.fixture(scope="module")
def plain_merging(merging: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(merging, method="plain", num_threads=1, verify=False)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_follow_schemas_whatever_is_drafted(
    drafting: SpeculativeDecoder, plain_merging: SpeculativeDecoder, schema: dict[str, Any]
) -> None:
    for sampling in (GREEDY, SAMPLED):
        chunks = run(drafting, of_schema(schema), sampling=sampling)
        assert chunks[-1].finish_reason == "stop", text_of(chunks)
        jsonschema.validate(json.loads(text_of(chunks)), schema)
        plain = run(plain_merging, of_schema(schema), sampling=sampling)
        assert token_ids(chunks) == token_ids(plain)
        assert {len(chunk.pieces) for chunk in plain} == {1}


def test_forced_tokens_cost_no_step_of_their_own(
    drafting: SpeculativeDecoder, plain_merging: SpeculativeDecoder
) -> None:
    """The budget drafts nothing, so every draft is one of the grammar."""
    schema = SCHEMAS["deep"]
    prompt = drafting.prompt_tokenizer.encode(QUESTION)
    chunks = list(
        drafting.stream(prompt, grammar=of_schema(schema), max_new_tokens=99, budget=FixedBudget(0))
    )
    count = len(token_ids(chunks))
    assert text_of(chunks) == '{"a": {"b": {"c": {"d": {"e": 1}}}}}'
    # The first token comes with the prompt, and a step brings so many drafts and one token more.
    assert len(chunks) == 1 + -(-(count - 1) // (grammars.MAX_DRAFTS + 1))
    assert token_ids(chunks) == token_ids(run(plain_merging, of_schema(schema)))


@pytest.fixture(scope="module")
def plain(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)


@pytest.fixture(scope="module")
def batched(trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]) -> SpeculativeDecoder:
    bundle = make_tiny_bundle(trained_heads_dir / "ctc")
    return SpeculativeDecoder.from_bundle(bundle, max_num_seqs=4, num_threads=1, num_nodes=8)


GRAMMARS = {
    "schema": of_schema(SCHEMAS["records"]),
    "object": Grammar(JSON),
    "regex": PHONE,
    "ebnf": EXPRESSION,
    "lark": Grammar(EBNF, 'start: "yes" | "no" /!{1,3}/'),
    "choice": Grammar(CHOICE, '["yes", "yesterday", "ja \\"wohl\\" ✓"]'),
}
TEXTS = {
    "regex": r"[0-9]{3}-[0-9]{2}",
    "ebnf": r"[0-9+();]+;",
    "lark": "yes|no!{1,3}",
    "choice": 'yes|yesterday|ja "wohl" ✓',
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("settings", [{}, *SAMPLING_SETTINGS.values()], ids=["greedy", *SAMPLING_SETTINGS])
def test_every_way_to_choose_tokens(
    plain: SpeculativeDecoder, batched: SpeculativeDecoder, name: str, settings: dict[str, Any]
) -> None:
    sampling = SamplingParams(seed=3, **settings)
    expected = run(plain, GRAMMARS[name], sampling=sampling, max_new_tokens=60)
    found = run(batched, GRAMMARS[name], sampling=sampling, max_new_tokens=60)
    assert token_ids(found) == token_ids(expected)
    if name in TEXTS and found[-1].finish_reason == "stop":
        assert re.fullmatch(TEXTS[name], text_of(found))


def test_a_batch_with_and_without_grammars(plain: SpeculativeDecoder, batched: SpeculativeDecoder) -> None:
    requests: list[Any] = []
    for index, grammar in enumerate([None, *GRAMMARS.values(), None, PHONE]):
        prompt = plain.prompt_tokenizer.encode(f"{index}?")
        sampling = GREEDY if index % 2 else SamplingParams(temperature=0.8, seed=index)
        requests.append((prompt, {"max_new_tokens": 50, "grammar": grammar, "sampling": sampling}))
    expected = [token_ids(list(plain.stream(prompt, **options))) for prompt, options in requests]
    for seed in range(2):
        assert decode_together(batched, requests, np.random.default_rng(seed)) == expected


def test_steps_on_a_device_choose_on_the_host(plain: SpeculativeDecoder, tiny_step_bundle: Path) -> None:
    device = SpeculativeDecoder.from_bundle(tiny_step_bundle, step="graph", num_nodes=8)
    for grammar in (PHONE, GRAMMARS["schema"]):
        for sampling in (GREEDY, SAMPLED):
            options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 100}
            assert token_ids(run(device, grammar, **options)) == token_ids(run(plain, grammar, **options))


def test_scores_and_stop_strings(plain: SpeculativeDecoder, batched: SpeculativeDecoder) -> None:
    """Scores are the model's own, without the grammar; a stop string ends a text before the grammar does."""
    sampling = SamplingParams(log_probs=True, top_log_probs=2)
    for decoder in (plain, batched):
        chunks = run(decoder, PHONE, sampling=sampling)
        pieces = [piece for chunk in chunks for piece in chunk.pieces]
        assert all(piece.log_prob is not None and piece.log_prob < piece.top[0][1] + 1e-6 for piece in pieces)
        assert any(piece.token_id not in dict(piece.top) for piece in pieces)
        ended = run(decoder, PHONE, stop_strings=["-"])
        assert re.fullmatch("[0-9]{3}", text_of(ended))
        assert ended[-1].finish_reason == "stop"


def test_the_mask_is_what_a_grammar_allows(plain: SpeculativeDecoder) -> None:
    """By hand, for tokens of one byte."""
    eos = plain.sequence_factory.eos_token_ids[0]
    byte = {text: plain.prompt_tokenizer.encode(text, raw=True)[0] for text in "abcd"}
    state = plain.sequence_factory.grammars.start(Grammar(REGEX, "a(b|c)?d*"), {eos})
    after_b = {"d", eos}
    expected: dict[str, set[Any]] = {"": {"a"}, "a": {"b", "c", "d", eos}, "ab": after_b, "abd": after_b}
    for text, allowed in expected.items():
        state = plain.sequence_factory.grammars.start(Grammar(REGEX, "a(b|c)?d*"), {eos})
        for character in text:
            state.advance(byte[character])
        tokens = {token if isinstance(token, int) else byte[token] for token in allowed}
        assert set(np.flatnonzero(state.allowed()).tolist()) == tokens
    # A request's own stop token takes the place of the model's.
    state = plain.sequence_factory.grammars.start(Grammar(REGEX, "a*"), {byte["d"]})
    assert set(np.flatnonzero(state.allowed()).tolist()) == {byte["a"], byte["d"]}


def test_a_stop_token_of_the_request_ends_the_text(plain: SpeculativeDecoder) -> None:
    (line_end,) = plain.prompt_tokenizer.encode("Q\n", raw=True)[1:]
    chunks = run(plain, GRAMMARS["choice"], stop_token_ids=[line_end])
    assert token_ids(chunks)[-1] == line_end
    assert re.fullmatch(TEXTS["choice"], text_of(chunks))
    for absent in ([], [-1], [plain.sequence_factory.vocab_size]):
        with pytest.raises(RequestError, match="grammar: needs a stop token"):
            run(plain, PHONE, stop_token_ids=absent)
    chunks = run(plain, GRAMMARS["choice"], stop_token_ids=[-1, line_end])
    assert token_ids(chunks)[-1] == line_end


def test_a_tree_keeps_what_the_grammar_allows(plain: SpeculativeDecoder) -> None:
    byte = {text: plain.prompt_tokenizer.encode(text, raw=True)[0] for text in "abxyz"}
    eos = plain.sequence_factory.eos_token_ids[0]
    state = plain.sequence_factory.grammars.start(Grammar(REGEX, "(a|b)xyz(a|b)"), {eos})
    tokens = np.array([0, byte["a"], byte["y"], byte["b"], byte["x"], byte["x"], byte["a"], eos], np.int64)
    parents = np.array([-1, 0, 0, 0, 1, 3, 5, 3])
    depths = np.array([0, 1, 1, 1, 2, 2, 3, 2])
    tree = TokenTree(tokens, parents, depths, -np.arange(8.0))
    kept, drafts = state.restrict(tree)
    assert kept.tokens.tolist() == [0, byte["a"], byte["b"], byte["x"], byte["x"]]
    assert kept.parents.tolist() == [-1, 0, 0, 1, 2]
    x, y, z = (byte[c] for c in "xyz")
    chains = [(1, [x, y, z]), (2, [x, y, z]), (3, [y, z]), (4, [y, z])]
    branches = [(0, [byte[c], x, y, z]) for c in "ab"]
    assert [(draft.node, draft.tokens) for draft in drafts] == chains + branches
    joined = join_continuations(kept, drafts, 7)
    assert [joined.path(node) for node in (5, 6, 7)] == [
        [byte[c] for c in path] for path in ("axy", "axyz", "bxy")
    ]
    half = np.log(0.5)
    assert joined.log_probs.tolist() == [0, half, half, half, half, half, half, half]
    assert joined.depths[5:].tolist() == [3, 4, 3]
    # The state is where it was.
    assert np.flatnonzero(state.allowed()).tolist() == sorted([byte["a"], byte["b"]])


def test_tokens_by_their_numbers_are_drafted_and_written(
    plain: SpeculativeDecoder, drafting: SpeculativeDecoder
) -> None:
    """llguidance 1.9 rolls back to a wrong state after such a token, so drafts are looked for in a copy."""
    for decoder in (plain, drafting):
        numbers = decoder.prompt_tokenizer.encode("abc", raw=True)
        grammar = Grammar(EBNF, "start: " + " ".join(f"<[{number}]>" for number in numbers))
        assert token_ids(run(decoder, grammar)) == [*numbers, decoder.sequence_factory.eos_token_ids[0]]


def test_a_text_that_fails_has_ended(plain: SpeculativeDecoder) -> None:
    """Else its slot would stay taken by a sequence that nobody waits for."""
    prompt = plain.prompt_tokenizer.encode("x")
    sequence = plain.sequence_factory.make(prompt, max_new_tokens=9, grammar=PHONE)
    assert sequence.grammar is not None
    letter = plain.prompt_tokenizer.encode("a", raw=True)
    sequence.grammar.advance(letter[0])
    chunk = sequence.append(letter, ())
    assert chunk.error is not None
    assert chunk.finish_reason == "stop"


@pytest.mark.parametrize(("schema", "message"), REFUSED.values(), ids=REFUSED)
def test_schemas_that_are_refused(plain: SpeculativeDecoder, schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        run(plain, of_schema(schema))
    assert caught.value.field == "grammar"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("yaml", "a", "must be one of json, json_schema, regex"),
        (JSON, "{}", "must be empty for json"),
        (JSON_SCHEMA, "{", "must be JSON for json_schema"),
        (JSON_SCHEMA, "[" * 60000, "must be JSON for json_schema"),
        (REGEX, "", "must not be empty for regex"),
        (REGEX, "(", "unclosed group"),
        (REGEX, "(" * 60000, "cannot be used"),
        (EBNF, "start: foo", "unknown name"),
        (
            EBNF,
            "start: %json {" + '"p":{},' * 2001 + "}",
            "at most 2000 rules and properties, got 2002 colons",
        ),
        (EBNF, "root ::= " + "(" * 9000, "Failed to convert"),
        (EBNF, "start: a\na: a", "allows no text"),
        (EBNF, "start: <|nothing|>", "cannot be used"),
        (CHOICE, "[]", "must be a JSON list of texts"),
        (CHOICE, '["a", 1]', "must be a JSON list of texts"),
    ],
)
def test_grammars_that_are_refused(plain: SpeculativeDecoder, kind: str, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        run(plain, Grammar(kind, text))
    assert "\n" not in str(caught.value)


def test_a_compile_that_takes_too_long(plain: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_SECONDS", 0)
    with pytest.raises(RequestError, match="grammar: must compile within 0 s"):
        run(plain, Grammar(EBNF, "start: " + " | ".join(f'"x{index}"' for index in range(2000))))


def test_a_tokenizer_with_gaps(tiny_bundle_dir: Path) -> None:
    """llguidance would lose its last tokens."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    factory = decoder.sequence_factory
    tokenizer = json.loads(factory.prompt_tokenizer.tokenizer.to_str())
    del tokenizer["model"]["vocab"]["ÿ"]
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    factory.grammars = GrammarCompiler(tokenizer, factory.vocab_size, factory.eos_token_ids)
    with pytest.raises(RequestError, match="its ids must have no gaps, got 257 tokens up to 257"):
        run(decoder, PHONE)


def test_without_llguidance(tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape('pip install "ctc-speculator[structured]"')):
        run(decoder, PHONE)


@pytest.fixture
def stuck(plain: SpeculativeDecoder) -> Grammar:
    """A grammar that goes on with the model's end token, which is no text: after "ab" nothing is allowed."""
    eos = plain.prompt_tokenizer.tokenizer.id_to_token(plain.sequence_factory.eos_token_ids[0])
    return Grammar(EBNF, f'start: "ab" {eos} "c"')


def test_a_text_that_cannot_go_on_fails_alone(
    plain: SpeculativeDecoder, batched: SpeculativeDecoder, stuck: Grammar
) -> None:
    with pytest.raises(RequestError, match="grammar: cannot be followed here"):
        run(plain, stuck)
    prompt = plain.prompt_tokenizer.encode("x")
    with Scheduler(batched) as scheduler:
        failing = scheduler.stream(prompt, max_new_tokens=20, grammar=stuck)
        other = scheduler.stream(prompt, max_new_tokens=40)
        with pytest.raises(RequestError, match="grammar: cannot be followed here"):
            list(failing)
        assert token_ids(list(other)) == token_ids(list(plain.stream(prompt, max_new_tokens=40)))


def test_a_failure_behind_the_end_of_a_text_is_none(
    plain: SpeculativeDecoder, batched: SpeculativeDecoder, stuck: Grammar
) -> None:
    """A step may choose tokens behind ``max_new_tokens`` or a stop string, where the grammar fails."""
    endings: list[dict[str, Any]] = [{"max_new_tokens": count} for count in (1, 2)]
    for ending in (*endings, {"stop_strings": ["b"]}, {"stop_strings": ["a"]}):
        expected, found = (run(decoder, stuck, **ending) for decoder in (plain, batched))
        assert token_ids(found) == token_ids(expected)
        assert (text_of(found), found[-1].finish_reason) == (text_of(expected), expected[-1].finish_reason)
    for decoder in (plain, batched):
        with pytest.raises(RequestError, match="grammar: cannot be followed here"):
            run(decoder, stuck, max_new_tokens=3)

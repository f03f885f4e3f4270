"""Grammars of an output: a JSON schema, a regular expression, an EBNF grammar or a list of choices.

llguidance, which is optional, compiles a grammar and follows a text in it. ``runtime.decode.acceptance``
applies the mask of the tokens that may come next (``GrammarState.allowed``) to the logits of every node where
it chooses a token. Where a grammar leaves no choice of text, as in the name of a required property, the mask
has one token, which begins the tokenizer's own spelling of that text; so these tokens are drafted without a
draft head.
"""

import json
import math
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runtime.core.errors import RequestError
from runtime.core.options import CHOICE, EBNF, GRAMMAR_KINDS, JSON, JSON_FORM, JSON_SCHEMA, REGEX
from runtime.core.token_tree import TokenTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FIELD = "grammar"
# Characters of a grammar, and of a schema the values in each other and the properties and items of all its
# objects and lists. llguidance's time grows with the square of an object's properties: 2,000 take a second.
MAX_LENGTH, MAX_DEPTH, MAX_VALUES = 1 << 16, 64, 4000
MAX_PROPERTIES = 500
# Colons of a grammar, one for every rule and for every property of a schema inside it.
MAX_COLONS = 2000
# Symbols of a compiled grammar, a tenth of llguidance's default. Its other limits bound the work for a mask.
MAX_SYMBOLS = 50_000
# A request waits so long for its grammar to be compiled. Almost all take a few milliseconds.
MAX_SECONDS = 5.0
# Compiled grammars that are kept, and threads that compile.
MAX_COMPILED, NUM_THREADS = 128, 2
# Tokens that grammars draft in one step, for all its sequences together, where no head's tree is larger.
MAX_DRAFTS = 24
# Where so few tokens may follow, all of them are drafted.
MAX_BRANCHES = 4


def _refuse(problem: str) -> RequestError:
    return RequestError(problem, field=FIELD)


@dataclass(frozen=True)
class Grammar:
    """What an output has to be.

    kind: one of ``GRAMMAR_KINDS``
    text: the JSON schema, the regular expression, the grammar (in the notation of Lark, or of GBNF, whose
        rules have ``::=``), or the JSON list of choices; empty for ``json``, which is any JSON object
    Raises RequestError for a text that is too large, or no JSON where it must be.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise _refuse(f"must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")
        if len(self.text) > MAX_LENGTH:
            raise _refuse(f"must be at most {MAX_LENGTH} characters long, got {len(self.text)}")
        if self.kind == JSON and self.text:
            raise _refuse(f"must be empty for {JSON}, got {self.text[:80]!r}")
        if self.kind in (REGEX, EBNF) and not self.text:
            raise _refuse(f"must not be empty for {self.kind}")
        if self.kind == EBNF and self.text.count(":") > MAX_COLONS:
            found = self.text.count(":")
            raise _refuse(f"must have at most {MAX_COLONS} rules and properties, got {found} colons")
        if self.kind == JSON_SCHEMA:
            schema = self._read()
            if not isinstance(schema, dict):
                raise _refuse(f"must be a JSON schema, which is an object, got {self.text[:80]!r}")
            _check_size(schema)
        if self.kind == CHOICE:
            choices = self._read()
            if not isinstance(choices, list) or not choices or not all(_is_text(each) for each in choices):
                raise _refuse(f"must be a JSON list of texts that are not empty, got {self.text[:80]!r}")

    def _read(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            raise _refuse(f"must be JSON for {self.kind}, got {self.text[:80]!r}") from None

    def definition(self) -> str:
        """The grammar in llguidance's form. Raises ValueError for one that has no such form."""
        from llguidance import LLMatcher, grammar_from

        if self.kind in (JSON, JSON_SCHEMA):
            return LLMatcher.grammar_from_json_schema(self.text or '{"type": "object"}', overrides=JSON_FORM)
        if self.kind == CHOICE:
            choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(self.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        return grammar_from("ebnf" if self.kind == EBNF else "regex", self.text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _check_size(schema: Any) -> None:
    """Raises RequestError for a schema that is too deep or has too many parts."""
    level, depth, count = [schema], 0, 0
    while level:
        depth += 1
        parts: list[Any] = []
        for value in level:
            if isinstance(value, dict) and len(value) > MAX_PROPERTIES:
                raise _refuse(f"must have at most {MAX_PROPERTIES} properties an object, got {len(value)}")
            if isinstance(value, (dict, list)):
                parts += value.values() if isinstance(value, dict) else value
        count += len(parts)
        if depth > MAX_DEPTH:
            raise _refuse(f"must have at most {MAX_DEPTH} values in each other, got more")
        if count > MAX_VALUES:
            raise _refuse(f"must have at most {MAX_VALUES} values, got more")
        level = parts


class GrammarState:
    """Where one text stands in its grammar.

    num_taken: tokens of the text that follow the grammar
    failure: why the text cannot go on after them; it ends with the next token then
    """

    def __init__(self, matcher: "LLMatcher", eos: Collection[int], stops: Collection[int], vocab_size: int):
        """matcher: a copy of its own, at the beginning

        eos: the tokens that end a text for the matcher; stops: those that do so for the sequence
        """
        self.num_taken = 0
        self.failure: RequestError | None = None
        self._matcher = matcher
        self._eos = np.fromiter(eos, np.int64)
        self._stops = np.fromiter(stops, np.int64)
        self._vocab_size = vocab_size
        self._ended = False

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens [V] that may come next; stop tokens are among them exactly where the text may end."""
        if self._ended:
            return self._only_stops()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._eos] = False
        allowed[self._stops] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            self._fail()
            return self._only_stops()
        return allowed

    def _only_stops(self) -> NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[self._stops] = True
        return allowed

    def _fail(self) -> None:
        reason = self._matcher.get_error().partition("\n")[0] or str(self._matcher.stop_reason())
        self.failure = _refuse(f"cannot be followed here, because it allows no token or too many: {reason}")
        self._ended = True

    def advance(self, token: int) -> None:
        """The text goes on with a token that ``allowed`` has."""
        if self._ended:
            return
        if token in self._stops:
            self._ended = True
        elif self._matcher.try_consume_tokens([token]) != 1:
            self._fail()
            return
        self.num_taken += 1

    def restrict(self, tree: TokenTree) -> "tuple[TokenTree, list[Continuation]]":
        """The part of a tree that the grammar allows, and what the grammar itself drafts below its nodes.

        The tree's root is the text's last token. Stop tokens are left out: as the last token they need no
        node.
        """
        if self._ended:
            return TokenTree.root(int(tree.tokens[0])), []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[1:].tolist(), 1):
            children.setdefault(parent, []).append(node)
        # A copy walks: after ``<[n]>``, a token by its number, llguidance rolls back to a wrong state.
        tokens, matcher = tree.tokens.tolist(), self._matcher.deep_copy()
        forced: dict[int, list[int]] = {}

        def visit(node: int) -> None:
            forced[node] = found = self._forced(matcher)
            for child in children.get(node, ()):
                token = tokens[child]
                if self._ends(token) or (found and token != found[0]):
                    continue
                if matcher.try_consume_tokens([token]):
                    visit(child)
                    matcher.rollback(1)

        visit(0)
        kept = sorted(forced)
        drafts = [Continuation(place, forced[node]) for place, node in enumerate(kept) if forced[node]]
        drafts += self._branches(matcher, forced[0])
        return tree.subset(np.array(kept, np.int64)), drafts

    def _ends(self, token: int) -> bool:
        return token in self._eos or token in self._stops

    def _forced(self, matcher: "LLMatcher") -> list[int]:
        """The tokens that come next whatever is chosen; all but a stop token."""
        tokens = matcher.compute_ff_tokens()
        return tokens[: next((at for at, token in enumerate(tokens) if self._ends(token)), None)]

    def _branches(self, matcher: "LLMatcher", chain: list[int]) -> "list[Continuation]":
        """All tokens that may follow a chain after the root, where they are few, as in "true" or "false".

        matcher: at the root; it is left somewhere else
        """
        taken = matcher.try_consume_tokens(chain) if chain else 0
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        options: list[int] = []
        if taken == len(chain) and np.count_nonzero(bits) <= MAX_BRANCHES:
            tokens = np.flatnonzero(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
            options = [token for token in tokens.tolist() if not self._ends(token)]
        found = []
        if 1 < len(options) <= MAX_BRANCHES:
            log_prob = -math.log(len(options))
            for token in options:
                matcher.try_consume_tokens([token])
                found.append(Continuation(0, [*chain, token, *self._forced(matcher)], log_prob))
                matcher.rollback(1)
        return found


@dataclass(frozen=True)
class Continuation:
    """Tokens that a grammar drafts below a node of a tree.

    log_prob: of the last token, given the node; 0 where the grammar forces it
    """

    node: int
    tokens: Sequence[int]
    log_prob: float = 0.0


def join_continuations(tree: TokenTree, drafts: Sequence[Continuation], num_nodes: int) -> TokenTree:
    """A tree with what a grammar drafts, up to ``num_nodes`` drafts in all; the most probable come first.

    drafts: for the tree's nodes, and perhaps for further ones, which are left out
    """
    if len(tree) > num_nodes or not drafts:
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depths, log_probs = tree.depths.tolist(), tree.log_probs.tolist()
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    known = [draft for draft in drafts if draft.node < len(tree)]
    for draft in sorted(known, key=lambda draft: log_probs[draft.node] + draft.log_prob, reverse=True):
        node = draft.node
        log_prob = log_probs[node] + draft.log_prob
        for token in draft.tokens:
            child = children.get((node, token))
            if child is None:
                if len(tokens) > num_nodes:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                log_probs.append(log_prob)
            log_probs[child] = max(log_probs[child], log_prob)
            node = child
    return TokenTree(
        np.array(tokens, np.int64), np.array(parents, np.int64), np.array(depths), np.array(log_probs)
    )


class GrammarCompiler:
    """Compiles grammars for one model, in threads of its own; the last ones are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()

    def start(self, grammar: Grammar, stop_token_ids: Collection[int]) -> GrammarState:
        """The beginning of a text. Call it neither from an event loop nor from the scheduler's thread.

        stop_token_ids: those of the sequence
        Raises RequestError for a grammar that cannot be used or takes too long, and without llguidance.
        """
        self.prepare()
        # A stop token that the vocabulary does not have ends no text.
        stops = [token for token in stop_token_ids if 0 <= token < self._vocab_size]
        if not stops or not self._eos_token_ids:
            raise _refuse("needs a stop token of the model, which ends the text where it may end; got none")
        try:
            matcher = self._pool.submit(self._compiled, grammar).result(MAX_SECONDS)
        except TimeoutError:
            raise _refuse(f"must compile within {MAX_SECONDS:g} s, got one that takes longer") from None
        return self._state(matcher, stops)

    def prepare(self) -> None:
        """Read the vocabulary, which takes up to a second for a large one. Raises RequestError."""
        with self._lock:
            _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            problem = 'needs llguidance, which is not installed: pip install "ctc-speculator[structured]"'
            raise _refuse(problem) from None
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if max(ids, default=-1) + 1 != len(ids):  # llguidance would take the number of tokens for the last id
            problem = f"its ids must have no gaps, got {len(ids)} tokens up to {max(ids)}"
            raise _refuse(f"llguidance cannot use this model's tokenizer: {problem}")
        try:
            return LLTokenizer(self._tokenizer.to_str(), self._vocab_size, self._eos_token_ids or None)
        except Exception as error:
            raise _refuse(f"llguidance cannot use this model's tokenizer: {error}") from error

    def _state(self, matcher: "LLMatcher", stop_token_ids: Collection[int]) -> GrammarState:
        return GrammarState(matcher.deep_copy(), self._eos_token_ids, stop_token_ids, self._vocab_size)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        """The matcher at the beginning of a text. Raises RequestError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
        try:
            matcher = LLMatcher(self._vocabulary, grammar.definition(), log_level=0, limits=limits)
        except ValueError as error:
            raise _refuse(_shown(error)) from error
        if matcher.is_error():
            raise _refuse(_shown(matcher.get_error()))
        state = self._state(matcher, self._eos_token_ids)
        state.allowed()
        if state.failure is not None:
            raise _refuse("allows no text")
        return matcher


def _shown(error: object) -> str:
    """An error of llguidance in one line."""
    return "cannot be used: " + " ".join(str(error).replace("<non-verbose/>", "").split())[:300]

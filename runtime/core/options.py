"""Options of decoding that command lines, servers and the decoder share, and what a bundle allows of them.

Command lines read this module before they load anything, so it imports no large library.
"""

import logging
from typing import Any

from runtime.core.bundle import DRAFT, GRAPH_STEP, METHODS, PLAIN, BundleManifest
from runtime.core.errors import RequestError

LOGGER = logging.getLogger(__name__)
# The best fixed number of draft nodes on a CPU, where a verify pass costs more with every node.
DEFAULT_NUM_NODES = 8
# Threads of an engine, and sequences that decode at a time, at most.
MAX_NUM_THREADS, MAX_NUM_SEQS = 256, 1024
# Tokens of a prompt that one pass reads at most. More make the reading faster and its memory larger.
MAX_PREFILL_CHUNK = 512
# Tokens of the passes of a GPU over prompts. Parts of other lengths are padded, because libraries compile
# kernels for every new shape.
PROMPT_SIZES = (64, 128, 256, 512)
# Tokens of a prompt that a server reads at a time while other sequences decode. More make prompts faster, and
# the other sequences wait longer.
SHARED_PREFILL_CHUNK = 64
# Requests that wait in a server at most; others are refused.
DEFAULT_MAX_QUEUE_SIZE = 64
# Tokens of prompts that wait in a server to be read at most, unless a single prompt has more.
DEFAULT_MAX_QUEUE_TOKENS = 65536
# Memory of the keys and values that a server or a chat keeps for later prompts, in MiB (2**20 bytes).
DEFAULT_PREFIX_CACHE_MB = 512
MAX_PREFIX_CACHE_MB = 2**20
# The shapes of draft trees: all branches of a search, or its best path alone.
SHAPES = TREE, CHAIN = ("tree", "chain")
# Kinds of grammars of an output. The names are those of TensorRT-LLM's guides; ``choice`` is vLLM's.
GRAMMAR_KINDS = JSON, JSON_SCHEMA, REGEX, EBNF, CHOICE = (
    "json",
    "json_schema",
    "regex",
    "ebnf_grammar",
    "choice",
)
# How JSON is written in an output, as options of llguidance: in one line, as Python's ``json`` does. A model
# that may indent can go on indenting, and where white space is free nothing is forced.
JSON_FORM: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "lenient": False,
    "coerce_one_of": False,
}
# Sampling options that say which tokens may be drawn and how often, in the order in which they apply.
SAMPLING_FILTERS = ("temperature", "top_k", "top_p", "min_p")
# Names of before for ``draft``, which refused heads of another kind.
OLD_METHODS = ("ctc", "streaming")


def current_method(name: str) -> str:
    """An argument type: the method, under the name that it has now. An old name is logged in one line."""
    if name not in OLD_METHODS:
        return name
    LOGGER.warning("method: %r is an old name of %r and goes with the next release", name, DRAFT)
    return DRAFT


def choose_method(
    manifest: BundleManifest, method: str | None, where: object, *, option: str = "method"
) -> str:
    """``draft`` or ``plain``; by default ``draft`` where the bundle has a draft head.

    where, option: what messages call the bundle and the setting
    Raises RequestError, which says what the bundle holds, for a method that it cannot have; also by default
    where its head can only be compiled.
    """
    spec = manifest.drafter
    if method is None:
        method = DRAFT if spec else PLAIN
    method = current_method(method)
    if method not in METHODS:
        raise RequestError(f"must be one of {', '.join(METHODS)}, got {method!r}", field=option)
    if method == PLAIN:
        return PLAIN
    if spec is None:
        raise RequestError(f"{where} holds no draft head, so it can only decode with 'plain'", field=option)
    if spec.drafts_in_verify_pass and manifest.engine_plan is not None:
        raise RequestError(
            f"{where} holds a {spec.drafter_type} head of speculative streams for {manifest.target}, which "
            f"is compiled and checked only; its engines decode with {PLAIN!r}, and streams with a bundle of "
            "the target onnxruntime",
            field=option,
        )
    return DRAFT


def choose_prompt_lookup(
    manifest: BundleManifest,
    method: str,
    step: str,
    wanted: bool | None,
    *,
    tree: str = TREE,
    option: str = "prompt_lookup",
) -> bool:
    """Whether drafts also come from the text; by default beside those of a draft head, where they can.

    method, step, tree: those that were chosen
    option: what messages call the setting
    Raises RequestError, with the reason, where drafts of the text are wanted but cannot be had.
    """
    spec, problem = manifest.drafter, None
    if step == GRAPH_STEP:
        problem = "steps on the host look up drafts in the text, graph steps do not"
    elif tree == CHAIN:
        problem = "drafts of the text and of the head make a tree together, got a chain"
    elif method == DRAFT and spec is not None and spec.drafts_in_verify_pass:
        problem = "streams of the verify pass draft after every node of their own trees only"
    if wanted and problem:
        raise RequestError(problem, field=option)
    return method == DRAFT and problem is None if wanted is None else wanted

"""The loop on the real engine: lossless whatever is drafted, and clear about what it cannot serve."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.core.baselines import SEARCHES
from runtime.core.errors import BundleError, DeviceMemoryError, RequestError
from runtime.core.lattice import Search
from runtime.decode.batch import Batch
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.step import HostStep, StepResult
from runtime.decoder import SpeculativeDecoder
from runtime.engines.kv_cache import LARGE_BUCKET
from runtime.engines.ort import OrtEngine
from runtime.text import PromptTokenizer
from tests.fakes import OracleProposer, chunks_of, known_texts, token_ids

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text")
NEW_TOKENS = 60
WARM = SamplingParams(temperature=1.0, seed=5)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.5, seed=6)


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, **options}
    return token_ids(list(decoder.stream(prompt, **options)))


@pytest.fixture(scope="module")
def plain(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)


@pytest.fixture(scope="module")
def plain_text(plain: SpeculativeDecoder) -> Callable[[str], list[int]]:
    """What the target model writes after a text of ``PROMPTS`` by itself."""
    return cache(lambda text: tokens_of(plain, plain.prompt_tokenizer.encode(text)))


@pytest.fixture(scope="module")
def ctc(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="draft", num_threads=1, num_nodes=8)


def test_plain_equals_hugging_face_generate(plain: SpeculativeDecoder, tiny_model_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for text in PROMPTS:
        prompt = plain.prompt_tokenizer.encode(text)
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert tokens_of(plain, prompt) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("num_nodes", [1, 5, 16])
def test_speculation_is_lossless(
    plain_text: Callable[[str], list[int]], tiny_bundle_dir: Path, search: Search, num_nodes: int
) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, search=search, num_nodes=num_nodes, num_threads=1
    )
    for text in PROMPTS:
        assert tokens_of(decoder, decoder.prompt_tokenizer.encode(text)) == plain_text(text)


@pytest.mark.parametrize("num_nodes", [1, 5, 16])
def test_a_chain_is_lossless(
    plain_text: Callable[[str], list[int]], tiny_bundle_dir: Path, num_nodes: int
) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, tree="chain", num_nodes=num_nodes, num_threads=1
    )
    for text in PROMPTS:
        assert tokens_of(decoder, decoder.prompt_tokenizer.encode(text)) == plain_text(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "star"}, "tree: must be one of tree, chain, got 'star'"),
        ({"tree": "chain", "search": SEARCHES["paper"]}, "tree: a chain comes from the prefix search"),
        ({"tree": "chain", "step": "graph"}, "tree: steps on the host verify a chain"),
    ],
)
def test_chains_that_are_refused(tiny_bundle_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, **options)


def runner_of(decoder: SpeculativeDecoder) -> HostStep:
    assert isinstance(decoder.batch.runner, HostStep)
    return decoder.batch.runner


def with_an_oracle(decoder: SpeculativeDecoder, texts: list[list[int]], seed: int = 0) -> OracleProposer:
    """Let a decoder draft what comes in one of the texts, among wrong branches."""
    # Plain decoding brings no features to the host; the oracle only looks at the tokens.
    oracle = OracleProposer(known_texts(texts), language=None, seed=seed)
    decoder.batch = Batch(HostStep(runner_of(decoder).target_model, oracle))
    return oracle


def test_decoders_that_share_a_target_model_take_turns(
    plain_text: Callable[[str], list[int]], tiny_bundle_dir: Path
) -> None:
    first = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, num_nodes=8)
    target_model = runner_of(first).target_model
    second = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, search=SEARCHES["paper"], num_threads=1, num_nodes=8, target_model=target_model
    )
    assert runner_of(second).target_model is target_model
    for text in PROMPTS:
        for decoder in (first, second):
            assert tokens_of(decoder, decoder.prompt_tokenizer.encode(text)) == plain_text(text)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_branches_are_lossless(
    plain: SpeculativeDecoder, tiny_bundle_dir: Path, seed: int, sampling: SamplingParams
) -> None:
    """Long accepted paths through scattered nodes: every commit moves keys and values."""
    prompt = plain.prompt_tokenizer.encode(PROMPTS[seed])
    expected = tokens_of(plain, prompt, stop_token_ids=(), sampling=sampling)
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    oracle = with_an_oracle(decoder, [prompt + expected], seed)
    chunks = chunks_of(decoder, prompt, NEW_TOKENS, sampling=sampling, budget=FixedBudget(16))
    assert token_ids(chunks) == expected
    assert len(chunks) < 0.6 * NEW_TOKENS
    # It was told of every token that became context, in order: all but the last one.
    (told,) = oracle.ended
    assert told[: len(prompt) + NEW_TOKENS - 1] == (prompt + expected)[:-1]


def test_a_wrong_commit_is_noticed(
    plain: SpeculativeDecoder, tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: leave accepted positions where they are and the text changes."""
    prompt = plain.prompt_tokenizer.encode(PROMPTS[1])
    expected = tokens_of(plain, prompt, stop_token_ids=())
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    with_an_oracle(decoder, [prompt + expected])
    monkeypatch.setattr(runner_of(decoder).target_model.engine.kv, "commit", lambda *args: None)
    assert token_ids(chunks_of(decoder, prompt, NEW_TOKENS, budget=FixedBudget(16))) != expected


def test_axes_can_be_rounded_up(
    plain: SpeculativeDecoder, tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine with captured graphs would: padding changes no text, with a draft head or an oracle."""
    buckets = (4, 16, 64)

    def round_up(engine: OrtEngine, **axes: int) -> dict[str, int]:
        return {
            name: min((bucket for bucket in buckets if bucket >= size), default=size)
            if name in ("N", "M", "A")
            else size
            for name, size in axes.items()
        }

    prompts = [plain.prompt_tokenizer.encode(text) for text in PROMPTS]
    expected = [tokens_of(plain, prompt, stop_token_ids=()) for prompt in prompts]
    exact = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, num_nodes=8)
    lengths = [len(chunks_of(exact, prompt, NEW_TOKENS)) for prompt in prompts]
    monkeypatch.setattr(OrtEngine, "round_up", round_up)
    padded = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, num_nodes=8)
    oracle = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    with_an_oracle(oracle, [prompt + text for prompt, text in zip(prompts, expected, strict=True)])
    for prompt, text, length in zip(prompts, expected, lengths, strict=True):
        chunks = chunks_of(padded, prompt, NEW_TOKENS)
        assert token_ids(chunks) == text
        # The head's drafts are as good.
        assert len(chunks) == length
        assert token_ids(chunks_of(oracle, prompt, NEW_TOKENS, budget=FixedBudget(16))) == text


def test_prompt_in_chunks_gives_the_same(tiny_bundle_dir: Path, ctc: SpeculativeDecoder) -> None:
    prompt = np.random.default_rng(0).integers(2, 250, 101).tolist()
    chunked = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, num_nodes=8)
    runner_of(chunked).prefill_chunk_size = 16
    whole, parts = (list(decoder.stream(prompt, max_new_tokens=40)) for decoder in (ctc, chunked))
    # The same chunks, not only the same tokens: the draft head has read the same context.
    assert [chunk.token_ids for chunk in whole] == [chunk.token_ids for chunk in parts]


def test_context_grows_across_buckets(plain: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = np.random.default_rng(1).integers(2, 250, 240).tolist()
    options = {"max_new_tokens": 512 - 240, "stop_token_ids": ()}
    output = tokens_of(ctc, prompt, **options)
    assert len(output) == 512 - 240
    assert output == tokens_of(plain, prompt, **options)


def test_a_short_request_after_a_long_one_uses_a_small_cache(ctc: SpeculativeDecoder) -> None:
    stream = ctc.stream([70] * 300, max_new_tokens=40)
    next(stream)
    assert runner_of(ctc).target_model.engine.kv.capacity > 256
    tokens_of(ctc, [70] * 3, max_new_tokens=4)
    assert runner_of(ctc).target_model.engine.kv.capacity <= LARGE_BUCKET


def test_requests_do_not_see_each_other(ctc: SpeculativeDecoder) -> None:
    first, second = (ctc.prompt_tokenizer.encode(text) for text in PROMPTS[:2])
    alone = tokens_of(ctc, first)
    tokens_of(ctc, second)
    assert tokens_of(ctc, first) == alone


def test_a_stream_tells_its_budget_the_times_of_steps(ctc: SpeculativeDecoder) -> None:
    """A load measured beside other work would otherwise decide for the decoder's life."""
    times: list[float] = []

    class Recorded(FixedBudget):
        def learn(self, result: StepResult, ms: float | None = None) -> None:
            assert ms is not None
            times.append(ms)

    chunks = chunks_of(ctc, [5, 9], NEW_TOKENS, budget=Recorded(4))
    assert len(times) == len(chunks) - 1
    assert min(times) > 0


def test_a_stream_that_was_overtaken_says_so(ctc: SpeculativeDecoder) -> None:
    first = ctc.stream([70, 71], max_new_tokens=20, stop_token_ids=())
    next(first)
    expected = tokens_of(ctc, [80, 81])
    with pytest.raises(RequestError, match="another one was started"):
        next(first)
    assert tokens_of(ctc, [80, 81]) == expected


def test_stop_token_ends_the_output(plain: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = plain.prompt_tokenizer.encode(PROMPTS[0])
    chunks = list(plain.stream(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    output = token_ids(chunks)
    # One that would add to the text.
    stop = next(chunk.token_ids[0] for chunk in chunks[10:] if chunk.text)
    for decoder in (plain, ctc):
        chunks = list(decoder.stream(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[stop]))
        found = token_ids(chunks)
        assert found == output[: output.index(stop) + 1]
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == "stop"
        without = decoder.stream(prompt, max_new_tokens=len(found) - 1, stop_token_ids=())
        assert "".join(chunk.text for chunk in chunks) == "".join(chunk.text for chunk in without)


def test_max_new_tokens_is_exact(ctc: SpeculativeDecoder) -> None:
    prompt = ctc.prompt_tokenizer.encode(PROMPTS[0])
    for count in (1, 2, 7):
        chunks = list(ctc.stream(prompt, max_new_tokens=count, stop_token_ids=()))
        assert sum(len(chunk.token_ids) for chunk in chunks) == count
        assert chunks[-1].finish_reason == "length"


def test_stop_string_is_cut_off(plain: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = plain.prompt_tokenizer.encode(PROMPTS[1])
    whole = "".join(chunk.text for chunk in plain.stream(prompt, max_new_tokens=NEW_TOKENS))
    stop = whole[8:11]
    expected = whole[: whole.index(stop)]
    for decoder in (plain, ctc):
        chunks = list(decoder.stream(prompt, max_new_tokens=NEW_TOKENS, stop_strings=[stop]))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (lambda n: [], {}, "prompt: must not be empty"),
        (lambda n: [5, 999], {}, "token ids must be below 258, got 999 at index 1"),
        (lambda n: [5, -1], {}, "got -1 at index 1"),
        (lambda n: [5] * n, {}, "must be shorter than the context of 512 tokens, got 512"),
        (lambda n: [5], {"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        (lambda n: [5] * 500, {"max_new_tokens": 13}, "max_new_tokens: must be at most 12"),
        (lambda n: [5], {"stop_strings": "ab"}, "stop_strings: must be a list of texts, got 'ab'"),
        (lambda n: [5], {"stop_strings": [""]}, "stop_strings: must not hold an empty string"),
        (lambda n: [5], {"stop_strings": ["a"] * 33}, "stop_strings: must be at most 32, got 33"),
        (
            lambda n: [5],
            {"stop_strings": ["b", "a" * 257]},
            "stop_strings: must have at most 256 characters each, got 257",
        ),
    ],
)
def test_bad_requests_are_refused_at_once(
    ctc: SpeculativeDecoder, prompt: Callable[[int], list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ctc.stream(prompt(512), **{"max_new_tokens": 8, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes: must be between 1 and 256, got 0"),
        ({"num_nodes": 257}, "num_nodes: must be between 1 and 256, got 257"),
        ({"max_length": 513}, "max_length: must be between 2 and 512"),
        ({"num_threads": 0}, "num_threads: must be between 1 and 256, got 0"),
        ({"method": "magic"}, "method: must be one of draft, plain, got 'magic'"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be between 1 and 1024, got 0"),
        ({"max_num_seqs": 100_000}, "max_num_seqs: must be between 1 and 1024, got 100000"),
    ],
)
def test_bad_loading_options_are_refused(
    tiny_bundle_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SpeculativeDecoder.from_bundle(tiny_bundle_dir, **options)


def test_bundle_without_head_decodes_plainly(tiny_model_dir: Path, tmp_path: Path) -> None:
    from export.build_engines import build

    build(tiny_model_dir, tmp_path / "plain")
    decoder = SpeculativeDecoder.from_bundle(tmp_path / "plain", num_threads=1)
    chunks = list(decoder.stream([70, 71, 72], max_new_tokens=5, stop_token_ids=()))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 5
    with pytest.raises(RequestError, match="holds no draft head"):
        SpeculativeDecoder.from_bundle(tmp_path / "plain", method="draft")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "diffusion"},
            "family: this runtime knows parallel, autoregressive and streaming, got 'diffusion'",
        ),
        ({"num_layers": 2}, "bundle.json: the drafter's layers, heads and sizes contradict its graph"),
        ({"head_dim": 8}, "bundle.json: the drafter's layers, heads and sizes contradict its graph"),
    ],
)
def test_a_head_that_the_runtime_cannot_run_is_refused(
    tiny_bundle_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = shutil.copytree(tiny_bundle_dir, tmp_path / "bundle")
    values = json.loads((directory / "bundle.json").read_text(encoding="utf-8"))
    values["drafter"].update(changes)
    (directory / "bundle.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(BundleError, match=message):
        SpeculativeDecoder.from_bundle(directory)


@pytest.mark.parametrize("part", ["prefixes", "tokenizer"])
def test_a_decoder_that_fails_to_load_leaves_no_runner_open(
    part: str, tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostStep] = []
    closed: list[HostStep] = []
    real = HostStep.__init__

    def make(self: HostStep, *args: Any, **options: Any) -> None:
        made.append(self)
        real(self, *args, **options)

    def fail(*args: Any) -> None:
        raise DeviceMemoryError("no memory")

    monkeypatch.setattr(HostStep, "__init__", make)
    monkeypatch.setattr(HostStep, "close", lambda self: closed.append(self))
    if part == "prefixes":
        monkeypatch.setattr(HostStep, "keep_prefixes", fail)
    else:
        monkeypatch.setattr(PromptTokenizer, "__init__", fail)
    with pytest.raises(DeviceMemoryError, match="no memory"):
        SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1, num_nodes=4, prefix_cache_mb=8)
    assert closed == made
    assert len(made) == (part == "prefixes")

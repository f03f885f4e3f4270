"""The loop on the real engine: lossless whatever is drafted, and clear about what it cannot serve."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from runtime.decoder import SpeculativeDecoder
from runtime.decoding.sampling import GREEDY, SamplingParams
from runtime.errors import BundleError, RequestError
from runtime.load import TRANSFORMS
from runtime.trees.token_tree import TokenTree

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text")
NEW_TOKENS = 60
WARM = SamplingParams(temperature=1.0, seed=5)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.5, seed=6)


class NoisyOracle:
    """Drafts the true continuation among wrong branches, shuffled, and now and then nothing true."""

    def __init__(self, prompt_length: int, output: list[int], vocab_size: int, seed: int):
        self.output, self.vocab_size, self.prompt_length = output, vocab_size, prompt_length
        self.random = np.random.default_rng(seed)
        self.context: list[int] = []

    def reset(self, row: int) -> None:
        """Remembers, to be looked at in the end."""

    def observe(self, row: int, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        self.context += token_ids.tolist()

    def draft(self, anchors: Sequence[int], num_nodes: int) -> list[list[int]]:
        done = len(self.context) - self.prompt_length + 1  # output tokens so far, the anchor with them
        return [self.output[done : done + int(self.random.integers(0, 6))]]

    def transform(self, proposal: list[int], *, anchor: int, num_nodes: int) -> TokenTree:
        tokens, parents, depths, node = [anchor], [-1], [0], 0
        for token in proposal:
            branches = [token, *self.random.integers(0, self.vocab_size, 2).tolist()]
            self.random.shuffle(branches)
            first = len(tokens)
            tokens += branches
            parents += [node] * 3
            depths += [depths[node] + 1] * 3
            node = first + branches.index(token)
        arrays = (np.array(values, np.int64) for values in (tokens, parents, depths))
        return TokenTree(*arrays, np.zeros(len(tokens)))  # type: ignore[arg-type,call-arg]


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, **options}
    return [token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids]


@pytest.fixture(scope="module")
def vanilla(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)


@pytest.fixture(scope="module")
def ctc(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="draft", num_threads=1)


def test_vanilla_equals_hugging_face_generate(vanilla: SpeculativeDecoder, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for text in PROMPTS:
        prompt = vanilla.prompt_tokenizer.encode(text)
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert tokens_of(vanilla, prompt) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("num_nodes", [1, 5, 16])
def test_speculation_is_lossless(
    vanilla: SpeculativeDecoder, tiny_bundle_dir: Path, transform: str, num_nodes: int
) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, transform=transform, num_nodes=num_nodes, num_threads=1
    )
    for text in PROMPTS:
        prompt = vanilla.prompt_tokenizer.encode(text)
        assert tokens_of(decoder, prompt) == tokens_of(vanilla, prompt)


def test_decoders_that_share_a_backbone_take_turns(
    vanilla: SpeculativeDecoder, tiny_bundle_dir: Path
) -> None:
    first = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1)
    backbone = first.batch.backbone
    second = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, transform="paper", num_threads=1, backbone=backbone
    )
    assert second.batch.backbone is backbone
    for text in PROMPTS:
        prompt = vanilla.prompt_tokenizer.encode(text)
        for decoder in (first, second):
            assert tokens_of(decoder, prompt) == tokens_of(vanilla, prompt)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_branches_are_lossless(
    vanilla: SpeculativeDecoder, tiny_bundle_dir: Path, seed: int, sampling: SamplingParams
) -> None:
    """Long accepted paths through scattered nodes: every commit moves key and value rows."""
    prompt = vanilla.prompt_tokenizer.encode(PROMPTS[seed])
    expected = tokens_of(vanilla, prompt, stop_token_ids=(), sampling=sampling)
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)
    decoder.batch.drafter = oracle = NoisyOracle(len(prompt), expected, 258, seed)
    # Plain decoding brings no features to the host; the oracle only looks at the tokens.
    options = {"max_new_tokens": NEW_TOKENS, "sampling": sampling}
    chunks = list(decoder.stream(prompt, stop_token_ids=(), **options))  # type: ignore[arg-type]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert len(chunks) < 0.6 * NEW_TOKENS
    # It was told of every token that became context, in order: all but the last ones.
    assert oracle.context[: len(prompt) + NEW_TOKENS - 8] == (prompt + expected)[:-8]


def test_a_wrong_commit_is_noticed(
    vanilla: SpeculativeDecoder, tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: leave accepted rows where they are and the text changes."""
    prompt = vanilla.prompt_tokenizer.encode(PROMPTS[1])
    expected = tokens_of(vanilla, prompt, stop_token_ids=())
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)
    decoder.batch.drafter = NoisyOracle(len(prompt), expected, 258, 1)
    monkeypatch.setattr(decoder.batch.backbone.engine.kv, "commit", lambda *args: None)
    assert tokens_of(decoder, prompt, stop_token_ids=()) != expected


def test_prompt_in_chunks_gives_the_same(tiny_bundle_dir: Path, ctc: SpeculativeDecoder) -> None:
    prompt = np.random.default_rng(0).integers(2, 250, 101).tolist()
    chunked = SpeculativeDecoder.from_bundle(tiny_bundle_dir, num_threads=1)
    chunked.batch.backbone.prefill_chunk = 16
    whole, parts = (
        list(ctc.stream(prompt, max_new_tokens=40)),
        list(chunked.stream(prompt, max_new_tokens=40)),
    )
    # The same chunks, not only the same tokens: the draft head has read the same context.
    assert [chunk.token_ids for chunk in whole] == [chunk.token_ids for chunk in parts]


def test_context_grows_across_buckets(vanilla: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = np.random.default_rng(1).integers(2, 250, 240).tolist()
    options = {"max_new_tokens": 512 - 240, "stop_token_ids": ()}
    output = tokens_of(ctc, prompt, **options)
    assert len(output) == 512 - 240
    assert output == tokens_of(vanilla, prompt, **options)


def test_a_short_request_after_a_long_one_uses_a_small_cache(ctc: SpeculativeDecoder) -> None:
    stream = ctc.stream([70] * 300, max_new_tokens=40)
    next(stream)
    assert ctc.batch.backbone.engine.kv.capacity > 256
    tokens_of(ctc, [70] * 3, max_new_tokens=4)
    assert ctc.batch.backbone.engine.kv.capacity == 256


def test_requests_do_not_see_each_other(ctc: SpeculativeDecoder) -> None:
    first, second = (ctc.prompt_tokenizer.encode(text) for text in PROMPTS[:2])
    alone = tokens_of(ctc, first)
    tokens_of(ctc, second)
    assert tokens_of(ctc, first) == alone


def test_a_stream_that_was_overtaken_says_so(ctc: SpeculativeDecoder) -> None:
    first = ctc.stream([70, 71], max_new_tokens=20, stop_token_ids=())
    next(first)
    expected = tokens_of(ctc, [80, 81])
    with pytest.raises(RequestError, match="another one was started"):
        next(first)
    assert tokens_of(ctc, [80, 81]) == expected


def test_stop_token_ends_the_output(vanilla: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = vanilla.prompt_tokenizer.encode(PROMPTS[0])
    chunks = list(vanilla.stream(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    output = [token for chunk in chunks for token in chunk.token_ids]
    # One that would add to the text.
    stop = next(chunk.token_ids[0] for chunk in chunks[10:] if chunk.text)
    for decoder in (vanilla, ctc):
        chunks = list(decoder.stream(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[stop]))
        found = [token for chunk in chunks for token in chunk.token_ids]
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


def test_stop_string_is_cut_off(vanilla: SpeculativeDecoder, ctc: SpeculativeDecoder) -> None:
    prompt = vanilla.prompt_tokenizer.encode(PROMPTS[1])
    whole = "".join(chunk.text for chunk in vanilla.stream(prompt, max_new_tokens=NEW_TOKENS))
    stop = whole[8:11]
    expected = whole[: whole.index(stop)]
    for decoder in (vanilla, ctc):
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


def test_bad_loading_options_are_refused(tiny_bundle_dir: Path) -> None:
    for options, message in (
        ({"num_nodes": 0}, "num_nodes: must be auto or between 1 and"),
        ({"max_length": 513}, "max_length: must be between 2 and 512"),
        ({"num_threads": 0}, "num_threads: must be between 1 and 256, got 0"),
        ({"method": "magic"}, "method: must be one of draft, vanilla"),
        ({"transform": "magic"}, "transform: must be one of"),
    ):
        with pytest.raises(RequestError, match=message):
            SpeculativeDecoder.from_bundle(tiny_bundle_dir, **options)  # type: ignore[arg-type]


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
        ({"drafter_type": "gru"}, "drafter_type: this runtime knows ctc, block, medusa, .*, got 'gru'"),
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

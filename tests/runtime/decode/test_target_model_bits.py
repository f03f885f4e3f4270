"""Trees that keep to a block of keys, and the test of equal bits when a bundle is loaded."""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from export.build_engines import build
from export.options import BLOCKS, FUSED, Options
from runtime.core.bundle import MANIFEST_NAME, Bundle
from runtime.core.token_tree import TokenTree
from runtime.decode.step import HostStep
from runtime.decode.target_model import TargetModel, keeps_bits, within_block
from runtime.decoder import SpeculativeDecoder
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.operators import operator_library
from runtime.engines.ort import OrtEngine, key_block
from runtime.engines.protocol import UNBROKEN
from runtime.engines.recorder import NullRecorder
from runtime.load import host
from runtime.load.host import load_target_model

BLOCK = 16
# The forms of a graph: with operators that are compiled here, and with standard ones.
COMPILED, STANDARD = "compiled", "standard"


@pytest.fixture(params=[COMPILED, STANDARD])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form in which target models are loaded."""
    found = str(request.param)
    if found == STANDARD:
        monkeypatch.setattr(host, "has_compiled_form", lambda *_: False)
    elif operator_library() is None:
        pytest.skip("this machine does not compile the operators")
    return found


PRECISIONS = pytest.mark.parametrize(
    "options",
    [
        Options("fp32"),
        Options("int8"),
        Options("int8", int8_scales=BLOCKS),
        Options("int4"),
        Options("int4", int4_block_size=128),
    ],
    ids=["fp32", "int8 columns", "int8 blocks", "int4", "int4 in blocks of 128"],
)


def tree_of(parents: list[int], probs: list[float]) -> TokenTree:
    """A tree with tokens of 10 on; ``probs``: that a path to a node is accepted."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    count = len(parents)
    return TokenTree(np.arange(10, 10 + count), np.array(parents), np.array(depths), np.log(probs))


WIDE = tree_of([-1, 0, 0, 1, 1, 3], [1, 0.5, 0.4, 0.3, 0.1, 0.05])


@pytest.mark.parametrize("length", [0, BLOCK - 6, 3 * BLOCK + 1])
def test_a_tree_inside_a_block_stays(length: int) -> None:
    assert within_block(WIDE, length, BLOCK) is WIDE


def test_a_chain_may_reach_over_an_end() -> None:
    chain = tree_of([-1, 0, 1, 2], [1, 0.5, 0.4, 0.3])
    for length in range(2 * BLOCK):
        assert within_block(chain, length, BLOCK) is chain


@pytest.mark.parametrize(
    ("room", "tokens"),
    [
        (5, [10, 11, 12, 13, 14]),  # 1.3 drafts before the end, 0.85 in the chain
        (3, [10, 11, 12]),  # 0.9 against 0.85
        (2, [10, 11, 13, 15]),
        (1, [10, 11, 13, 15]),
    ],
)
def test_a_tree_over_an_end_becomes_its_better_part(room: int, tokens: list[int]) -> None:
    found = within_block(WIDE, 4 * BLOCK - room, BLOCK)
    assert found.tokens.tolist() == tokens
    is_chain = found.depths.tolist() == list(range(len(found)))
    assert len(found) <= room or is_chain


@pytest.mark.parametrize(("head_dim", "block"), [(16, 1024), (32, 512), (64, 256), (80, 128), (256, 128)])
def test_the_block_of_a_head_size(head_dim: int, block: int) -> None:
    assert key_block(head_dim) == block


def random_tree(random: np.random.Generator, count: int, vocab_size: int) -> TokenTree:
    parents = [-1, *(int(random.integers(node)) for node in range(1, count + 1))]
    tree = tree_of(parents, [1.0] * len(parents))
    return dataclasses.replace(tree, tokens=random.integers(0, vocab_size, len(tree)))


def bits_are_equal(bundle: Path) -> bool:
    """The test at loading, of a target model that was loaded without it."""
    found = Bundle.load(bundle, verify=False)
    found = Bundle(found.path, msgspec.structs.replace(found.manifest, row_invariant=False))
    model = found.manifest.model
    target_model = load_target_model(found, max_nodes=32, max_num_seqs=2, num_threads=1)
    assert target_model.key_block is None
    return keeps_bits(
        target_model,
        block=key_block(model.head_dim),
        vocab_size=model.vocab_size,
        max_length=model.max_position_embeddings,
        max_num_seqs=2,
    )


def cache_of(target_model: TargetModel) -> SlabKVCache:
    assert isinstance(target_model.engine, OrtEngine)
    return target_model.engine.kv


def test_bits_are_equal_in_invariant_attention_and_differ_in_fused(
    tiny_bundle_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert bits_are_equal(tiny_bundle_dir)
    build(tiny_model_dir, tmp_path / "fused", options=Options(attention=FUSED))
    assert not bits_are_equal(tmp_path / "fused")


def test_a_bundle_whose_bits_differ_here_computes_in_float32(
    make_tiny_bundle: Callable[..., Path],
    trained_heads_dir: Path,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundle = Bundle.load(make_tiny_bundle(trained_heads_dir / "ctc", Options("int8")))
    assert (bundle.manifest.row_invariant, bundle.manifest.int8_products) == (True, True)
    asked = []
    real = OrtEngine.__init__

    def init(self: OrtEngine, *args: object, int8_products: bool, **options: object) -> None:
        asked.append(int8_products)
        real(self, *args, int8_products=int8_products, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(OrtEngine, "__init__", init)
    assert load_target_model(bundle, max_nodes=8, num_threads=1).key_block is not None
    assert asked == [True]
    asked.clear()
    monkeypatch.setattr(host, "keeps_bits", lambda *_, **__: False)
    with caplog.at_level(logging.WARNING):
        assert load_target_model(bundle, max_nodes=8, num_threads=1).key_block is None
    assert asked == ([True, True, False] if form == COMPILED else [True, False])
    assert ("compiled operators are wrong on this machine" in caplog.text) == (form == COMPILED)
    assert "passes of different shapes differ in the last bits on this machine" in caplog.text


def rows_differ(monkeypatch: pytest.MonkeyPatch, *, odd: bool) -> None:
    """Let the test at loading find that one row differs, as in int4 with AVX2 alone, or any odd number."""

    def keeps(target_model: TargetModel, **options: Any) -> bool:
        engine = target_model.engine
        return (engine.row_multiple if odd else engine.min_rows) > 1 and keeps_bits(target_model, **options)

    monkeypatch.setattr(host, "keeps_bits", keeps)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["head", "streams", "streams in a pass of their own"])
def test_where_one_row_or_odd_numbers_of_rows_differ_a_pass_computes_more(
    kind: str,
    odd: bool,
    form: str,
    make_tiny_bundle: Callable[..., Path],
    trained_heads_dir: Path,
    stream_bundle_of: Callable[[str], Path],
    own_pass_bundle_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Texts, with prompts that end in a chunk of one token, are those of passes of one row."""
    if kind == "head":
        bundle = make_tiny_bundle(trained_heads_dir / "ctc", Options("int8"))
    else:
        bundle = (stream_bundle_of if kind == "streams" else own_pass_bundle_of)("streaming")
    prompts = [[7], [5, 9, 3, 11, 2, 8, 30, 31, 32]]

    def texts(method: str | None) -> list[list[int]]:
        decoder = SpeculativeDecoder.from_bundle(bundle, method=method, num_nodes=4, num_threads=1)
        assert isinstance(decoder.batch.runner, HostStep)
        target_model = decoder.batch.runner.target_model
        target_model.prefill_chunk_size = 2
        sizes.add(tuple(target_model.engine.round_up(B=1, N=rows, M=1)["N"] for rows in (1, 3, 4)))
        assert target_model.engine.round_up(B=2, N=1, M=1) == {"B": 2, "N": 1, "M": 1}
        return [
            [int(token) for chunk in decoder.stream(ids, max_new_tokens=24) for token in chunk.token_ids]
            for ids in prompts
        ]

    sizes: set[tuple[int, ...]] = set()
    expected = texts("plain")
    assert sizes == {(1, 3, 4)}
    rows_differ(monkeypatch, odd=odd)
    sizes.clear()
    assert [texts("plain"), texts(None)] == [expected, expected]
    assert sizes == {(2, 4 if odd else 3, 4)}
    assert not [record for record in caplog.records if record.name.startswith("runtime")]


def test_int4_in_blocks_of_128_keeps_its_bits(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a model all of whose products have such blocks: where odd numbers of rows differ, they are even."""
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model_dir)
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.update({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    bundle = build(model_dir, tmp_path / "bundle", options=Options("int4", int4_block_size=128))
    caplog.clear()
    assert load_target_model(bundle, max_nodes=8, num_threads=1).key_block is not None
    assert not [record for record in caplog.records if record.name.startswith("runtime")]


@PRECISIONS
def test_random_trees_have_the_bits_of_plain_decoding(
    options: Options, form: str, make_tiny_bundle: Callable[..., Path], trained_heads_dir: Path
) -> None:
    """The path of random trees after texts of random lengths, alone and in a batch."""
    bundle = Bundle.load(make_tiny_bundle(trained_heads_dir / "ctc", options), verify=False)
    assert bundle.manifest.int8_products == (options.precision != "fp32")
    assert ("backbone.int8.onnx" in bundle.manifest.files) == (options == Options("int8"))
    target_model = load_target_model(bundle, max_nodes=32, max_num_seqs=3, num_threads=1)
    block, vocab_size = target_model.key_block, bundle.manifest.model.vocab_size
    assert block is not None
    assert (block == UNBROKEN) == (form == COMPILED)
    cache, random = cache_of(target_model), np.random.default_rng(3)
    for trial in range(12):
        lengths = [int(random.integers(1, 300)) for _ in range(3)]
        trees = [random_tree(random, int(random.integers(1, 24)), vocab_size) for _ in lengths]
        trees = [within_block(tree, length, block) for tree, length in zip(trees, lengths, strict=True)]
        cache.reserve(400, 3)
        cache.randomize(3, max(lengths))
        before = cache.slab.copy()
        paths = [_longest_path(tree) for tree in trees]
        expected = []
        for slot, (tree, length, path) in enumerate(zip(trees, lengths, paths, strict=True)):
            cache.slab[:, 0] = before[:, slot]
            for at, node in enumerate(path):
                root = TokenTree.root(int(tree.tokens[node]))
                logits = target_model.verify(
                    [root], [length + at], logits=True, recorder=NullRecorder()
                ).logits
                assert logits is not None
                expected.append(logits[0, 0].copy())
        cache.slab[:] = before
        together = logits_of(target_model, trees, lengths)
        found = [together[slot, node] for slot, path in enumerate(paths) for node in path]
        assert np.array_equal(np.array(found), np.array(expected)), (trial, lengths)


@PRECISIONS
def test_chunks_of_a_prompt_leave_the_same_keys_and_logits(
    options: Options, form: str, make_tiny_bundle: Callable[..., Path], trained_heads_dir: Path
) -> None:
    bundle = Bundle.load(make_tiny_bundle(trained_heads_dir / "ctc", options), verify=False)
    target_model = load_target_model(bundle, max_nodes=8, num_threads=1)
    tokens = np.random.default_rng(5).integers(0, bundle.manifest.model.vocab_size, 300)
    found = []
    for size in (300, 64, 7, 1):
        target_model.prefill_chunk_size = size
        logits = target_model.read(tokens, logits=True).logits
        assert logits is not None
        found.append((logits.copy(), cache_of(target_model).slab[:, 0, :, : tokens.size].copy()))
        target_model.release(0)
    for logits, keys_and_values in found[1:]:
        assert np.array_equal(logits, found[0][0])
        assert np.array_equal(keys_and_values, found[0][1])


def logits_of(target_model: TargetModel, trees: list[TokenTree], lengths: list[int]) -> NDArray[np.float32]:
    logits = target_model.verify(trees, lengths, logits=True, recorder=NullRecorder()).logits
    assert logits is not None
    return logits


def _longest_path(tree: TokenTree) -> list[int]:
    node = int(tree.depths.argmax())
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def test_manifests_of_before_promise_nothing(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    text = (tiny_bundle_dir / MANIFEST_NAME).read_text(encoding="utf-8")
    for field in ("row_invariant", "int8_products"):
        text = "\n".join(line for line in text.splitlines() if f'"{field}"' not in line)
    manifest = type(Bundle.load(tiny_bundle_dir, verify=False).manifest).from_json(text)
    assert not manifest.row_invariant
    assert not manifest.int8_products

"""Heads that fill frames as bundles: the graph is the module, and what it drafts never changes the text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from drafters.base import Drafter
from drafters.lattice import frame_top_k
from drafters.parallel import ParallelDrafter
from drafters.registry import load_drafter
from export.contracts import parallel_contract
from export.errors import ExportError
from export.heads import prepare_drafter
from export.options import Options
from export.reference import parallel_reference
from export.source import load_source
from export.validate import check_parallel
from runtime.budget.step_times import MAX_AUTO_NODES
from runtime.budget.tree_budget import TreeBudget
from runtime.bundle import Bundle
from runtime.decoder import AUTO, SpeculativeDecoder
from runtime.decoding.recorder import StageRecorder
from runtime.load import SPARE_FRAMES, TRANSFORMS
from runtime.proposers.base import ParallelProposer
from runtime.trees.token_tree import TokenTree

NEW_TOKENS = 40


def load_head(model_dir: Path, directory: Path) -> ParallelDrafter:
    head = load_source(model_dir, directory).drafter
    assert isinstance(head, ParallelDrafter)
    return head


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": (), **options}
    return [token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids]


@pytest.fixture(scope="module")
def vanilla(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)


def test_the_graph_is_the_module(trained_head: Any, tiny_model_dir: Path) -> None:
    """On another context than the build's own check."""
    manifest = Bundle.load(trained_head.bundle).manifest
    head, spec, contract = (
        load_head(tiny_model_dir, trained_head.directory),
        manifest.drafter,
        manifest.graphs["drafter"],
    )
    assert spec is not None
    assert (spec.drafter_type, spec.num_frames) == (head.config.drafter_type, head.config.num_frames)
    width = frame_top_k(head.config, Options.top_k)
    assert (spec.merges_repeats, spec.top_k) == (head.config.merges_repeats, width)
    assert contract == parallel_contract(head.config, spec)
    assert set(manifest.validation["drafter"]) == {"prefill", "step"}
    features = np.random.default_rng(3).normal(size=(31, 128)).astype(np.float32)
    expected = parallel_reference(head, features, width=width, seed=3)
    # No output goes unchecked.
    own = {tensor.name for tensor in contract.outputs if not tensor.name.startswith("present_")}
    assert [set(lattice) for lattice in expected.lattices] == [own, own]
    found = check_parallel(trained_head.bundle / "drafter.onnx", contract, expected)
    assert set(found) == {"prefill", "step"}


def test_what_the_graph_is_made_of(trained_head: Any) -> None:
    graph = onnx.load(trained_head.bundle / "drafter.onnx", load_external_data=False)
    config = load_drafter(trained_head.directory).config
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 24)}
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("Attention") == config.num_layers
    assert kinds.count("RotaryEmbedding") == kinds.count("TensorScatter") == 2 * config.num_layers
    # Nothing is asked for that the head does not read.
    inputs = {value.name for value in graph.graph.input}
    assert ("attn_mask" in inputs) == ("write_index" in inputs) == (config.num_layers > 0)
    assert ("anchor_ids" in inputs) == (config.trunk == "attention" or config.transition != "none")
    outputs = {value.name for value in graph.graph.output}
    assert ("blank_logprobs" in outputs) == (config.drafter_type == "ctc")
    assert ("transition_following" in outputs) == (config.transition != "none")
    assert ("transition_frames" in outputs) == (config.transition == "mlp")


def test_a_wrong_weight_is_found(trained_head: Any, tiny_model_dir: Path) -> None:
    """The comparison can fail: every weight of the head matters to it."""
    manifest = Bundle.load(trained_head.bundle).manifest
    contract, spec = manifest.graphs["drafter"], manifest.drafter
    assert spec is not None
    head = load_head(tiny_model_dir, trained_head.directory)
    features = np.random.default_rng(0).normal(size=(12, 128)).astype(np.float32)
    for value in head.parameters():
        before = value.detach().clone()
        value.data.add_(torch.randn_like(value) * 0.1)
        wrong = parallel_reference(head, features, width=spec.top_k)
        value.data.copy_(before)
        message = r"drafter .*(the graph differs from PyTorch by|differ from PyTorch's)"
        with pytest.raises(ExportError, match=message):
            check_parallel(trained_head.bundle / "drafter.onnx", contract, wrong)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_speculation_is_lossless(vanilla: SpeculativeDecoder, trained_head: Any, transform: str) -> None:
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, transform=transform, num_threads=1)
    assert isinstance(decoder.batch.drafter, ParallelProposer)
    for text in (*trained_head.prompts[:2], "something it was not trained on"):
        prompt = vanilla.prompt_tokenizer.encode(text)
        expected = tokens_of(vanilla, prompt)
        for decoder.num_nodes in (1, 6, 24):
            assert tokens_of(decoder, prompt) == expected


@pytest.mark.parametrize("transform", ["prefix", "paper"])
def test_the_search_of_a_small_tree_fills_few_frames(trained_head: Any, transform: str) -> None:
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, transform=transform, num_threads=1)
    config = load_drafter(trained_head.directory).config
    drafter = decoder.batch.drafter
    tokens = np.arange(2, 9)
    features = decoder.batch.backbone.prefill(tokens, 0).features
    for num_nodes in (1, 2, 9):
        drafter.observe(0, tokens, features)
        (lattice,) = drafter.draft([5], num_nodes)
        wanted = num_nodes + (SPARE_FRAMES if config.has_blank else 0)
        if transform != "prefix" or config.trunk == "residual":
            wanted = config.num_frames
        assert lattice.frame_tokens.shape[0] == min(wanted, config.num_frames)
        drafter.reset(0)


def test_a_prompt_in_chunks_gives_the_same_drafts(
    trained_head: Any, first_tree: Callable[..., TokenTree]
) -> None:
    """The head's own context is continued from chunk to chunk, or, without a cache, its last row found."""
    prompt = np.random.default_rng(0).integers(2, 250, 101)
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1)
    whole, chunked = (first_tree(decoder, prompt, size) for size in (101, 16))
    assert np.array_equal(whole.tokens, chunked.tokens)
    assert np.array_equal(whole.parents, chunked.parents)
    np.testing.assert_allclose(whole.log_probs, chunked.log_probs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("calibration", [None, (0.5, 3.0), (0.5, -8.0)])
def test_a_budget_chooses_sizes_and_not_the_text(
    vanilla: SpeculativeDecoder, trained_head: Any, calibration: tuple[float, float] | None
) -> None:
    spec = Bundle.load(trained_head.bundle).manifest.drafter
    assert spec is not None
    assert spec.calibration == load_drafter(trained_head.directory).config.calibration
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_nodes=AUTO, num_threads=1)
    assert decoder.num_nodes == AUTO
    assert decoder.budget is not None
    assert np.all(np.diff(decoder.budget.step_ms) >= 0)
    # Ten steps of plain decoding for 24 drafts, so that what is chosen does not hang on the machine.
    decoder.budget = TreeBudget(np.linspace(1, 11, MAX_AUTO_NODES + 1)[None], calibration)
    decoder.batch.recorder = recorder = StageRecorder()
    for text in (*trained_head.prompts[:2], "something it was not trained on"):
        prompt = vanilla.prompt_tokenizer.encode(text)
        assert tokens_of(decoder, prompt) == tokens_of(vanilla, prompt)
    rows = {step.num_nodes for step in recorder.steps}
    assert len(rows) > 1
    assert rows <= set(range(1, MAX_AUTO_NODES + 2))


@pytest.mark.parametrize(("asked", "width"), [(5, 5), (16, 9)])
def test_a_transition_keeps_no_more_than_it_may_move(
    make_tiny_head: Callable[..., Drafter], asked: int, width: int
) -> None:
    head = make_tiny_head("ctc", transition="mlp", num_candidates=9, num_frames=3)
    assert isinstance(head, ParallelDrafter)
    features = np.random.default_rng(0).normal(size=(12, 128)).astype(np.float32)
    expected = parallel_reference(head, features, width=width)
    prepared = prepare_drafter(head, features, Options(top_k=asked))
    assert prepared.spec.top_k == width
    shapes = {tensor.name: tensor.shape[1:] for tensor in prepared.contract.outputs}
    assert shapes["frame_tokens"] == ("T", width)
    assert shapes["transition_following"] == ("T", width + 1, head.config.transition_size)  # the blank's too
    for name, array in expected.lattices[0].items():
        assert array.shape == tuple(3 if size == "T" else size for size in shapes[name])


@pytest.mark.parametrize("width", [0, 259])
def test_a_width_that_a_head_does_not_have(make_tiny_head: Callable[..., Drafter], width: int) -> None:
    message = f"--top-k: must be between 1 and 258 for this head, got {width}"
    with pytest.raises(ExportError, match=message):
        prepare_drafter(make_tiny_head(), np.zeros((12, 128), np.float32), Options(top_k=width))

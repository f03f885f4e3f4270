"""Parallel drafters as bundles: the graph equals the module, and its drafts never change the text."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from drafters.base import Drafter
from drafters.build import load_drafter
from drafters.parallel import ParallelDrafter
from export.errors import ExportError
from export.graphs.contracts import parallel_contract
from export.heads import prepare_drafter
from export.options import Options
from export.source import load_source
from export.verify.heads import check_parallel, parallel_reference
from export.verify.runner import GraphRunner
from runtime.core.baselines import SEARCHES
from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.lattice import Lattice
from runtime.core.token_tree import TokenTree
from runtime.decode.budget import AdaptiveBudget, FixedBudget
from runtime.decode.proposers.parallel import ParallelProposer
from runtime.decode.step import HostStep, StepResult
from runtime.decode.step_costs import StepCosts
from runtime.decode.step_times import MAX_NODES
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import NullRecorder, StageRecorder
from runtime.load.host import SPARE_FRAMES, load_proposer, load_target_model

# Heads know the first 24 by heart.
NEW_TOKENS = 32
UNKNOWN = "something it was not trained on"


def load_head(model_dir: Path, directory: Path) -> ParallelDrafter:
    head = load_source(model_dir, directory).drafter
    assert isinstance(head, ParallelDrafter)
    return head


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": (), **options}
    return [token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids]


@pytest.fixture(scope="module")
def plain_text(tiny_bundle_dir: Path) -> Callable[[str], tuple[list[int], list[int]]]:
    """The tokens of a prompt, and what is decoded after it without drafts."""
    plain = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)

    @cache
    def decode(text: str) -> tuple[list[int], list[int]]:
        prompt = plain.prompt_tokenizer.encode(text)
        return prompt, tokens_of(plain, prompt)

    return decode


def test_the_graph_is_the_module(
    trained_head: Any, tiny_model_dir: Path, open_graph: Callable[[Path, str], GraphRunner]
) -> None:
    """On another context than the build's own check."""
    manifest = Bundle.load(trained_head.bundle).manifest
    head = load_head(tiny_model_dir, trained_head.directory)
    spec, contract = manifest.drafter, manifest.graphs["drafter"]
    assert spec is not None
    assert (spec.drafter_type, spec.num_frames) == (head.config.drafter_type, head.config.num_frames)
    width = head.config.frame_top_k(Options.top_k)
    assert (spec.merges_repeats, spec.top_k) == (head.config.merges_repeats, width)
    assert set(manifest.validation["drafter"]) == {"prefill", "step", "equal_argmax"}
    features = np.random.default_rng(3).normal(size=(31, 128)).astype(np.float32)
    expected = parallel_reference(head, features, width=width, seed=3)
    # No output goes unchecked.
    own = {tensor.name for tensor in contract.outputs if not tensor.name.startswith("present_")}
    assert [set(lattice) for lattice in expected.lattices] == [own, own]
    found = check_parallel(open_graph(trained_head.bundle, "drafter"), expected)
    assert set(found) == {"prefill", "step", "equal_argmax"}
    assert found["equal_argmax"] == 1


def test_interface_is_the_contract(
    trained_head: Any, assert_interface: Callable[[Path, GraphSpec], None]
) -> None:
    manifest = Bundle.load(trained_head.bundle).manifest
    assert manifest.drafter is not None
    contract = parallel_contract(load_drafter(trained_head.directory).config, manifest.drafter)
    assert manifest.graphs["drafter"] == contract
    assert_interface(trained_head.bundle / "drafter.onnx", contract)


def test_what_the_graph_is_made_of(trained_head: Any) -> None:
    graph = onnx.load(trained_head.bundle / "drafter.onnx", load_external_data=False)
    config = load_drafter(trained_head.directory).config
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 24)}
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("Attention") == config.num_layers
    assert kinds.count("RotaryEmbedding") == kinds.count("TensorScatter") == 2 * config.num_layers
    # The graph has no input that the head does not read.
    inputs = {value.name for value in graph.graph.input}
    assert ("attn_mask" in inputs) == ("write_index" in inputs) == (config.num_layers > 0)
    assert ("anchor_ids" in inputs) == config.reads_anchor
    outputs = {value.name for value in graph.graph.output}
    assert ("blank_logprobs" in outputs) == config.has_blank
    assert ("transition_following" in outputs) == (config.transition != "none")
    assert ("transition_frames" in outputs) == (config.transition == "mlp")


def test_a_wrong_weight_is_found(
    trained_head: Any, tiny_model_dir: Path, open_graph: Callable[[Path, str], GraphRunner]
) -> None:
    """The comparison fails for a change of any weight of the head."""
    spec = Bundle.load(trained_head.bundle).manifest.drafter
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
            check_parallel(open_graph(trained_head.bundle, "drafter"), wrong)


@pytest.mark.parametrize("search", SEARCHES)
def test_speculation_is_lossless(
    plain_text: Callable[[str], tuple[list[int], list[int]]], trained_head: Any, search: str
) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        trained_head.bundle, search=SEARCHES[search], num_threads=1, num_nodes=8
    )
    runner = decoder.batch.runner
    assert isinstance(runner, HostStep)
    assert isinstance(runner.proposer, ParallelProposer)
    for text, sizes in ((trained_head.prompts[1], (1, 6, 24)), (UNKNOWN, (6,))):
        prompt, expected = plain_text(text)
        for num_nodes in sizes:
            assert tokens_of(decoder, prompt, budget=FixedBudget(num_nodes)) == expected


@pytest.mark.parametrize("search", ["prefix", "paper"])
def test_the_search_of_a_small_tree_fills_few_frames(trained_head: Any, search: str) -> None:
    config = load_drafter(trained_head.directory).config
    lattices: list[Lattice] = []

    def search_and_keep(lattice: Lattice, **options: int) -> TokenTree:
        lattices.append(lattice)
        return SEARCHES[search](lattice, **options)

    bundle = Bundle.load(trained_head.bundle)
    target_model = load_target_model(bundle, max_nodes=16, num_threads=1)
    proposer = load_proposer(bundle, "draft", search=SEARCHES[search], num_threads=1)
    assert isinstance(proposer, ParallelProposer)
    # Put in afterwards, because how many frames are filled depends on which search it is.
    proposer._search = search_and_keep
    tokens = np.arange(2, 9)
    features = target_model.prefill(tokens, 0).features
    for num_nodes in (1, 2, 9):
        proposer.append_context([0], [tokens], features)
        proposer.propose([5], num_nodes, NullRecorder())
        lattice = lattices[-1]
        wanted = num_nodes + (SPARE_FRAMES if config.has_blank else 0)
        if search != "prefix" or config.trunk == "residual":
            wanted = config.num_frames
        assert lattice.frame_tokens.shape[0] == min(wanted, config.num_frames)
        proposer.release(0)


def test_a_prompt_in_chunks_gives_the_same_drafts(
    trained_head: Any, first_tree: Callable[..., TokenTree]
) -> None:
    """From chunk to chunk a head's cache grows, or a head without one keeps the last position it read."""
    prompt = np.random.default_rng(0).integers(2, 250, 101)
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_threads=1, num_nodes=8)
    whole, chunked = (first_tree(decoder, prompt, size) for size in (101, 16))
    assert np.array_equal(whole.tokens, chunked.tokens)
    assert np.array_equal(whole.parents, chunked.parents)
    np.testing.assert_allclose(whole.log_probs, chunked.log_probs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("calibration", [None, (0.5, 3.0), (0.5, -8.0)])
def test_a_budget_chooses_sizes_and_not_the_text(
    plain_text: Callable[[str], tuple[list[int], list[int]]],
    trained_head: Any,
    calibration: tuple[float, float] | None,
) -> None:
    spec = Bundle.load(trained_head.bundle).manifest.drafter
    assert spec is not None
    assert spec.calibration == load_drafter(trained_head.directory).config.calibration
    decoder = SpeculativeDecoder.from_bundle(trained_head.bundle, num_nodes=None, num_threads=1)
    assert isinstance(decoder.new_budget(), AdaptiveBudget)
    # Step times are set here, so that the sizes chosen do not depend on the machine: a step that verifies
    # MAX_NODES drafts takes eleven times as long as one without drafts.
    costs = StepCosts(np.linspace(1, 11, MAX_NODES + 1)[None])

    class Untimed(AdaptiveBudget):
        def learn(self, result: StepResult, ms: float | None = None) -> None:
            super().learn(result)

    decoder.new_budget = partial(Untimed, costs, calibration)
    decoder.batch.runner.recorder = recorder = StageRecorder()
    for text in (trained_head.prompts[1], UNKNOWN):
        prompt, expected = plain_text(text)
        assert tokens_of(decoder, prompt) == expected
    sizes = {step.num_nodes for step in recorder.steps}
    assert len(sizes) > 1
    assert sizes <= set(range(1, MAX_NODES + 2))


@pytest.mark.parametrize(("asked", "width"), [(5, 5), (16, 9)])
def test_a_transition_keeps_no_more_than_it_may_move(
    make_tiny_head: Callable[..., Drafter], asked: int, width: int
) -> None:
    head = make_tiny_head("ctc", transition="mlp", num_candidates=9, num_frames=3)
    assert isinstance(head, ParallelDrafter)
    features = np.random.default_rng(0).normal(size=(12, 128)).astype(np.float32)
    expected = parallel_reference(head, features, width=width)
    prepared = prepare_drafter(head, Options(top_k=asked))
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
        prepare_drafter(make_tiny_head(), Options(top_k=width))

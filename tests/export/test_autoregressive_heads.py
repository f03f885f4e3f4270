"""Autoregressive drafters as bundles: the graph equals the module, and its drafts never change the text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from export.errors import ExportError
from export.graphs.contracts import autoregressive_contract
from export.heads import prepare_drafter
from export.options import Options
from export.verify.heads import autoregressive_reference, check_autoregressive
from export.verify.runner import GraphRunner
from runtime.core.baselines import paper_search
from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.errors import RequestError
from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.autoregressive import AutoregressiveProposer
from runtime.decode.step import HostStep
from runtime.decoder import SpeculativeDecoder
from training.data.batches import LiveFeatures, SampledBatch, all_anchors
from training.data.sequences import Sequences
from training.head_config import HeadConfig
from training.head_set import HeadSet

KINDS: dict[str, tuple[dict[str, Any], Options]] = {
    "hydra": ({"drafter_type": "hydra", "draft_vocab_size": 240}, Options()),
    "hydra++": (
        {"drafter_type": "hydra", "num_layers": 1, "head_depth": 2, "num_frames": 3},
        Options(top_k=5, beam_width=3, min_level_probability=0.0),
    ),
    "eagle": ({"drafter_type": "eagle"}, Options()),
}
PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text")


@dataclasses.dataclass(frozen=True)
class Built:
    head: AutoregressiveDrafter
    options: Options
    directory: Path
    bundle: Bundle


@pytest.fixture(scope="module")
def plain(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)


@pytest.fixture(scope="module")
def text(plain: SpeculativeDecoder, tiny_model_dir: Path) -> tuple[Tensor, SampledBatch]:
    """The text that the model writes after ``PROMPTS``: its features, and each of its tokens as an anchor."""
    prompts = [plain.prompt_tokenizer.encode(prompt) for prompt in PROMPTS]
    sequences = Sequences([(prompt, flat(tokens_of(plain, prompt))) for prompt in prompts])
    sampled = all_anchors(sequences, list(range(len(PROMPTS))), max_length=512)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    return LiveFeatures(model, (0, 1))(sampled.batch), sampled


def learn(head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch) -> None:
    """Train the head on the text until drafts are accepted."""
    depth = head.config.num_frames
    settings = HeadConfig(drafter_type=head.config.drafter_type, num_frames=depth)
    heads = HeadSet([head], (settings,), head.logits)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        heads(features, sampled).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module", params=list(KINDS))
def built(
    request: pytest.FixtureRequest,
    text: tuple[Tensor, SampledBatch],
    make_tiny_head: Callable[..., Drafter],
    make_tiny_bundle: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Built:
    settings, options = KINDS[request.param]
    head = make_tiny_head(**settings)
    assert isinstance(head, AutoregressiveDrafter)
    learn(head, *text)
    checkpoint = tmp_path_factory.mktemp("autoregressive") / request.param
    head.save_pretrained(checkpoint)
    directory = make_tiny_bundle(checkpoint, options)
    return Built(head, options, directory, Bundle.load(directory))


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[list[int]]:
    """The tokens of every chunk."""
    options = {"max_new_tokens": 32, "stop_token_ids": (), **options}
    return [chunk.token_ids for chunk in decoder.stream(prompt, **options)]


def flat(chunks: list[list[int]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]


def test_the_graph_is_the_module(built: Built, open_graph: Callable[[Path, str], GraphRunner]) -> None:
    """On another context than the build's own check, long enough for the cache to matter."""
    spec = built.bundle.manifest.drafter
    assert spec is not None
    assert (spec.top_k, spec.beam_width) == (built.options.top_k, built.options.beam_width)
    assert set(built.bundle.manifest.validation["drafter"]) == {"context", "draft", "equal_argmax"}
    features = np.random.default_rng(3).normal(size=(31, 128)).astype(np.float32)
    found = check_autoregressive(
        open_graph(built.directory, "drafter"), autoregressive_reference(built.head, features, seed=3)
    )
    assert found.pop("equal_argmax") == 1
    assert max(found.values()) < 1e-4


def test_interface_is_the_contract(built: Built, assert_interface: Callable[[Path, GraphSpec], None]) -> None:
    assert built.bundle.manifest.drafter is not None
    contract = autoregressive_contract(built.head, built.bundle.manifest.drafter)
    assert built.bundle.manifest.graphs["drafter"] == contract
    assert_interface(built.directory / "drafter.onnx", contract)


def test_standard_operators_only(built: Built) -> None:
    graph = onnx.load(built.directory / "drafter.onnx", load_external_data=False)
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 24)}
    kinds = [node.op_type for node in graph.graph.node]
    layers = built.head.config.num_layers
    assert kinds.count("TensorScatter") == kinds.count("RotaryEmbedding") == 2 * layers
    assert kinds.count("Attention") == layers


def test_a_wrong_weight_is_found(built: Built, open_graph: Callable[[Path, str], GraphRunner]) -> None:
    """The comparison fails for a change of any weight of the head."""
    features = np.random.default_rng(0).normal(size=(12, 128)).astype(np.float32)
    for value in built.head.parameters():
        before = value.detach().clone()
        value.data.add_(torch.randn_like(value) * 0.1)
        wrong = autoregressive_reference(built.head, features)
        value.data.copy_(before)
        with pytest.raises(ExportError, match=r"drafter .*: the graph differs from PyTorch by"):
            check_autoregressive(open_graph(built.directory, "drafter"), wrong)


@pytest.mark.parametrize("num_nodes", [1, 6, 24])
def test_speculation_is_lossless(plain: SpeculativeDecoder, built: Built, num_nodes: int) -> None:
    """With many drafts accepted, and so contexts that grow by several tokens a step."""
    decoder = SpeculativeDecoder.from_bundle(built.directory, num_nodes=num_nodes, num_threads=1)
    runner = decoder.batch.runner
    assert isinstance(runner, HostStep)
    assert isinstance(runner.proposer, AutoregressiveProposer)
    lengths = []
    for prompt in PROMPTS:
        ids = plain.prompt_tokenizer.encode(prompt)
        chunks = tokens_of(decoder, ids)
        assert flat(chunks) == flat(tokens_of(plain, ids))
        lengths += [len(chunk) for chunk in chunks[1:]]
    assert np.mean(lengths) > (1.5 if num_nodes == 1 else 2.2)


def test_a_prompt_in_chunks_gives_the_same_drafts(built: Built, first_tree: Callable[..., TokenTree]) -> None:
    prompt = np.random.default_rng(0).integers(2, 250, 101)
    decoder = SpeculativeDecoder.from_bundle(built.directory, num_threads=1, num_nodes=8)
    whole, chunked = (first_tree(decoder, prompt, size) for size in (101, 16))
    assert np.array_equal(whole.tokens, chunked.tokens)
    assert np.array_equal(whole.parents, chunked.parents)
    np.testing.assert_allclose(whole.log_probs, chunked.log_probs, atol=1e-4)


def test_context_grows_across_buckets(plain: SpeculativeDecoder, built: Built) -> None:
    """Up to the model's last position, where drafts would reach beyond it."""
    prompt = np.random.default_rng(1).integers(2, 250, 240).tolist()
    decoder = SpeculativeDecoder.from_bundle(built.directory, num_threads=1, num_nodes=16)
    options = {"max_new_tokens": 512 - 240}
    output = flat(tokens_of(decoder, prompt, **options))
    assert len(output) == 512 - 240
    assert output == flat(tokens_of(plain, prompt, **options))


def test_a_chain_is_the_head_s_best_child_after_child(
    plain: SpeculativeDecoder, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder.from_bundle(built.directory, num_threads=1, tree="chain", num_nodes=8)
    runner = decoder.batch.runner
    assert isinstance(runner, HostStep)
    propose = runner.proposer.propose
    chains: list[TokenTree] = []

    def record(*args: Any) -> list[TokenTree]:
        chains.extend(propose(*args))
        return chains[-1:]

    monkeypatch.setattr(runner.proposer, "propose", record)
    for text in PROMPTS:
        prompt = plain.prompt_tokenizer.encode(text)
        assert flat(tokens_of(decoder, prompt)) == flat(tokens_of(plain, prompt))
    assert max(map(len, chains)) > 2
    assert all(chain.parents.tolist() == list(range(-1, len(chain) - 1)) for chain in chains)


def test_requests_do_not_see_each_other(built: Built) -> None:
    decoder = SpeculativeDecoder.from_bundle(built.directory, num_threads=1, num_nodes=8)
    first, second = (decoder.prompt_tokenizer.encode(text) for text in PROMPTS[:2])
    alone = tokens_of(decoder, first)
    tokens_of(decoder, second)
    assert tokens_of(decoder, first) == alone


def test_a_search_for_parallel_drafters_is_refused(built: Built) -> None:
    with pytest.raises(RequestError, match=r"search: .* head, which expands its tree itself"):
        SpeculativeDecoder.from_bundle(built.directory, search=paper_search)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(top_k=0), "--top-k: must be between 1 and 258 for this head, got 0"),
        (Options(top_k=259), "--top-k: must be between 1 and 258 for this head, got 259"),
        (Options(beam_width=0), "--beam-width: must be between 1 and 256 for this head, got 0"),
        (
            Options(min_level_probability=1.0),
            r"--min-level-probability: must be at least 0 and below 1, got 1\.0",
        ),
    ],
)
def test_bad_options_are_refused(
    make_tiny_head: Callable[..., Drafter], options: Options, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        prepare_drafter(make_tiny_head("eagle"), options)

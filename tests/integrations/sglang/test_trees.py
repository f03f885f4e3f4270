"""SGLang's worker with trees of ours: the texts, the trees and the accepted drafts.

    SGLANG_SOURCE=PATH python -m pytest tests/integrations/sglang/test_trees.py

runs all of it with SGLang's own code too; without PATH, only with stand-ins.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.build import load_drafter
from drafters.parallel import ParallelDrafter
from drafters.tree_search import search
from export.draft_directory import draft_weights
from integrations.draft_directory import TREE, DraftError
from integrations.sglang.hooks import allow_trees, full_mask
from integrations.sglang.plugin import register
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from tests.integrations.chains import host_lattice, lattice_after
from tests.integrations.demo_texts import DEMO
from tests.integrations.sglang import fake_sglang, real_sglang
from tests.integrations.sglang.fake_trees import TreeWorker
from tests.integrations.sglang.tree_engine import (
    Requests,
    Target,
    greedy_text,
    paths,
    text_features,
)
from tests.integrations.transformers.models import VOCAB_SIZE, make_head, make_model

HEADS: dict[str, dict[str, Any]] = {
    "ctc-fused": {"frame_start": "fused", "transition": "mlp", "num_layers": 2, "num_frames": 7},
    "block-markov": {"drafter_type": "block", "transition": "markov", "num_frames": 6},
}


@dataclass
class Engine:
    """make_worker: of a draft model, a target, a block size and whether passes are captured"""

    models: dict[str, Any]
    make_worker: Callable[..., Any]
    draft_input: Callable[..., Any]

    def start(
        self, head: ParallelDrafter, target: Target, *, num_nodes: int, top_k: int, captured: bool = True
    ) -> Any:
        config = SimpleNamespace(
            ctc_speculator={"head": head.config.to_dict(), "top_k": top_k, "shape": TREE}
        )
        model = self.models["DFlashCTCForCausalLM"](config)
        model.load_weights(draft_weights(head, torch.float32).items())
        worker = self.make_worker(model, target, num_nodes + 1, uses_graphs=captured)
        worker.init_attention_backends()
        worker.init_cuda_graphs()
        return worker


@pytest.fixture(params=["stand-ins", "sources"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if request.param == "sources":
        if real_sglang.SOURCE is None:
            pytest.skip("SGLANG_SOURCE names SGLang's sources")
        with real_sglang.installed(monkeypatch) as found:
            register()
            found.apply_hooks()
            yield Engine(found.models, found.make_worker, found.draft_input)
    else:
        found = fake_sglang.install(monkeypatch, worker=TreeWorker)
        register()
        yield Engine(found.models, fake_sglang.worker_class(), SimpleNamespace)


def target_of(model: Any, head: ParallelDrafter, backend: str = "FlashInferAttnBackend") -> Target:
    target = Target(model, head)
    target.attn_backend = type(backend, (), {"init_forward_metadata": lambda self, batch: None})()
    return target


def our_tree(
    head: ParallelDrafter, features: torch.Tensor, anchor: int, num_nodes: int, top_k: int
) -> TokenTree:
    """The tree of a device's step in our runtime."""
    found = search(
        lattice_after(head, features, anchor, frames=num_nodes + 1, top_k=top_k),
        torch.tensor([[anchor]]),
        merges_repeats=head.config.merges_repeats,
        num_nodes=num_nodes,
    )
    return TokenTree(*(x[0].numpy() for x in (found.tokens, found.parents, found.depths, found.log_probs)))


def following(text: list[int], length: int, tree: TokenTree) -> Callable[[int], int]:
    """What the model chooses after each node whose path is the text's; ``length`` is the root's place."""
    return lambda node: text[length + 1 + int(tree.depths[node])]


@torch.no_grad()
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_texts_and_trees(name: str, captured: bool, engine: Engine) -> None:
    """Requests that join and leave get the model's own greedy text, and each step has our tree."""
    model = make_model("llama")
    head = make_head(model, **HEADS[name])
    assert isinstance(head, ParallelDrafter)
    target = target_of(model, head)
    worker = engine.start(head, target, num_nodes=5, top_k=6, captured=captured)
    requests = Requests(worker, target, engine.draft_input)
    prompts = {3: [5, 9, 31], 1: [7], 0: [40, 22, 5, 9, 9]}
    requests.prompts({place: prompts[place] for place in (3, 1)})
    steps = [[3, 1], [1], [1, 3]]
    for index, places in enumerate(steps):
        requests.step(places, host_lengths=index != 1)
    requests.prompts({0: prompts[0]})
    steps += [[0], [3, 0, 1], [1, 0], [0, 3]]
    for index, places in enumerate(steps[3:]):
        requests.step(places, host_lengths=index != 1)
    lengths = {place: len(ids) for place, ids in prompts.items()}
    texts = {place: greedy_text(model, ids, 30) for place, ids in prompts.items()}
    counts = {place: iter(requests.counts[place]) for place in prompts}
    for places, trees in zip(steps, target.trees, strict=True):
        for place, tree in zip(places, trees, strict=True):
            text, length = texts[place], lengths[place]
            features = text_features(model, head, text[:length])
            expected = our_tree(head, features, text[length], 5, 6)
            assert paths(tree) == paths(expected)
            path, _ = expected.walk(following(text, length, expected))
            assert next(counts[place]) == len(path)
            lengths[place] += len(path)
    for place, text in texts.items():
        assert requests.texts[place] == text[: len(requests.texts[place])]
        assert len(requests.texts[place]) == lengths[place] + 1


@torch.no_grad()
def test_the_demo_s_head_accepts_what_our_runtime_accepts(engine: Engine) -> None:
    """With as many nodes as leave the head all of its frames, and the exact search of a step on the host."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "backbone", dtype=torch.float32)
    head = load_drafter(DEMO / "heads" / "ctc").attach_model(model).eval()
    assert isinstance(head, ParallelDrafter)
    head.tabulate()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "backbone")
    prompts = ["Question: How many days are there in four weeks?\nAnswer:", "def add(a, b):\n    "]
    ids = {2: tokenizer(prompts[0]).input_ids, 0: tokenizer(prompts[1]).input_ids}
    num_nodes, top_k = head.config.num_frames - 1, 16
    target = target_of(model, head)
    worker = engine.start(head, target, num_nodes=num_nodes, top_k=top_k)
    requests = Requests(worker, target, engine.draft_input)
    requests.prompts(ids)
    for _ in range(6):
        requests.step(list(ids))
    accepted, found, shared = 0, 0, 0
    for index, place in enumerate(ids):
        text, length = greedy_text(model, ids[place], 80), len(ids[place])
        assert requests.texts[place] == text[: len(requests.texts[place])]
        for trees, count in zip(target.trees, requests.counts[place], strict=True):
            features = text_features(model, head, text[:length])
            nodes = paths(trees[index])
            assert nodes == paths(our_tree(head, features, text[length], num_nodes, top_k))
            tensors = lattice_after(head, features, text[length], frames=num_nodes + 1, top_k=top_k)
            lattice = host_lattice(tensors, merges_repeats=head.config.merges_repeats)
            exact = prefix_search(lattice, root_token=text[length], num_nodes=num_nodes)
            path, _ = exact.walk(following(text, length, exact))
            assert count == len(path)
            length += count
            accepted += count - 1
            found, shared = found + len(nodes), shared + len(nodes & paths(exact))
    # A search in fixed shapes keeps some prefixes alone, and may miss an improbable one.
    assert shared > 0.97 * found
    assert accepted > 20


class KnownTrees:
    """In a draft model's place: trees of random tokens in which a text's next ones are, at random places."""

    def __init__(self, requests: Requests, texts: dict[int, list[int]]):
        self.requests, self.texts = requests, texts
        self.random = np.random.default_rng(4)
        self.places: list[int] = []

    def __call__(
        self, hidden: torch.Tensor, anchor_ids: torch.Tensor, *rest: Any, num_nodes: int, **_: Any
    ) -> Any:
        roots = zip(self.places, anchor_ids.tolist(), strict=True)
        trees = [self._tree(place, root, num_nodes) for place, root in roots]
        tokens, parents = (torch.tensor(values) for values in zip(*trees, strict=True))
        return SimpleNamespace(tokens=tokens, parents=parents)

    def _tree(self, place: int, root: int, num_nodes: int) -> tuple[list[int], list[int]]:
        after = self.texts[place][len(self.requests.texts[place]) :]
        tokens, parents, last, depth = [root], [-1], 0, 0
        for node in range(1, num_nodes + 1):
            known = self.random.random() < 0.5
            parents.append(last if known else int(self.random.integers(node)))
            # Wrong drafts are no token of the text, and no two siblings are the same.
            tokens.append(after[depth] if known else VOCAB_SIZE - node)
            last, depth = (node, depth + 1) if known else (last, depth)
        return tokens, parents


@torch.no_grad()
def test_paths_through_branches(engine: Engine) -> None:
    """Keys, values and hidden states follow paths that skip nodes; rows of logits are in the path's order."""
    model = make_model("llama")
    head = make_head(model, num_frames=9)
    assert isinstance(head, ParallelDrafter)
    target = target_of(model, head, "TritonAttnBackend")
    worker = engine.start(head, target, num_nodes=8, top_k=6)
    requests = Requests(worker, target, engine.draft_input)
    prompts = {2: [5, 9, 31], 0: [7, 8]}
    known = KnownTrees(requests, {place: greedy_text(model, ids, 80) for place, ids in prompts.items()})
    worker.draft_model.trees = known
    requests.prompts(prompts)
    for index, places in enumerate([[2, 0], [0], [0, 2], [2], [2, 0], [0, 2]]):
        known.places = places
        out = requests.step(places, return_logprob=index % 2 == 0)
        rows = out.logits_output.next_token_logits
        if index % 2 == 0:
            for row, place in zip(rows.unflatten(0, (len(places), -1)), places, strict=True):
                count = requests.counts[place][-1]
                assert row[:count].argmax(-1).tolist() == requests.texts[place][-count:]
    for place, text in known.texts.items():
        assert requests.texts[place] == text[: len(requests.texts[place])]
        # The draft model's own cache has the context of the path too.
        slots = target.req_to_token[place, : len(requests.texts[place]) - 1]
        (layer,) = worker.draft_model.frame_layers
        features = text_features(model, head, text[: len(slots)])
        keys, values = layer.kv_proj_only(worker.draft_model.project_target_hidden(features))
        keys = layer.apply_k_rope(torch.arange(len(slots)), keys)
        expected = torch.stack((keys, values), dim=1).unflatten(-1, (-1, head.config.head_dim))
        torch.testing.assert_close(layer.attn.pool[slots], expected, atol=1e-5, rtol=0)
    assert sum(map(sum, requests.counts.values())) > 25


@torch.no_grad()
def test_a_grammar_is_asked_about_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    head = make_head(model)
    assert isinstance(head, ParallelDrafter)
    found = fake_sglang.install(monkeypatch, worker=TreeWorker)
    register()
    engine = Engine(found.models, fake_sglang.worker_class(), SimpleNamespace)
    target = target_of(model, head)
    worker = engine.start(head, target, num_nodes=3, top_k=6)
    requests = Requests(worker, target, SimpleNamespace)
    requests.prompts({1: [5, 9]})
    requests.step([1], has_grammar=True)
    (tree,) = target.trees[-1]
    first, sibling, tokens = (values[0].tolist() for values in worker.grammar.host)
    assert tokens == tree.tokens.tolist()
    children = [[k for k in range(4) if tree.parents[k] == node] for node in range(4)]
    assert first == [min(nodes, default=-1) for nodes in children]
    for nodes in children:
        assert [sibling[node] for node in nodes] == [*nodes[1:], -1][: len(nodes)]


def test_passes_are_captured_with_a_mask(engine: Engine) -> None:
    model = make_model("llama")
    head = make_head(model)
    assert isinstance(head, ParallelDrafter)
    target = target_of(model, head)
    graphs = sys.modules["sglang.srt.model_executor.runner.decode_cuda_graph_runner"]
    runner = graphs.DecodeCudaGraphRunner()
    buffers = SimpleNamespace(custom_mask=torch.ones(64, dtype=torch.bool))
    vars(runner).update(model_runner=target, buffers=buffers, captured_req_width=4)
    assert runner.get_spec_info(8) == "the engine's"
    engine.start(head, target, num_nodes=3, top_k=6)
    found = runner.get_spec_info(8)
    assert type(found).__name__ == "NgramVerifyInput"
    assert found.custom_mask is buffers.custom_mask
    assert found.num_tokens_per_req == 4
    assert found.capture_hidden_mode == "full"


@pytest.mark.parametrize(
    ("backend", "page_size", "message"),
    [
        ("FlashAttentionBackend", 1, "attention_backend: expected flashinfer or triton, which mask"),
        ("TritonAttnBackend", 16, "page_size: expected 1 for trees with triton, got 16"),
    ],
)
def test_attention_that_cannot_verify_trees(
    backend: str, page_size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SimpleNamespace(
        draft_model=SimpleNamespace(shape=TREE),
        page_size=page_size,
        model_runner=target_of(make_model("llama"), make_head(make_model("llama")), backend),  # type: ignore[arg-type]
    )
    fake_sglang.install(monkeypatch)
    with pytest.raises(DraftError, match=message):
        allow_trees(worker)


def test_the_mask_of_requests_of_different_lengths() -> None:
    ancestors = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [0, 1]]], dtype=torch.bool)
    found = full_mask(ancestors, torch.tensor([1, 3]), 20)
    assert found.int().tolist() == [1, 1, 0, 1, 1, 1, *[1, 1, 1, 1, 0], *[1, 1, 1, 0, 1], 1, 1, 1, 1]

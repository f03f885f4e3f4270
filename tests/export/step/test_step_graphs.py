"""The tensor functions of a device step against what the host does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.search_graph import random_lattice, tensors_of
from drafters.config import DrafterConfig
from drafters.tree_search import TreeTensors, search
from export.errors import ExportError
from export.graphs.layers import scattered
from export.heads import check_step_nodes
from export.options import Options
from export.quantisation.precision import Precision
from export.step.acceptance import accept
from export.step.contracts import accept_contract, commit_contract, lattice_inputs, search_contract
from export.step.modules import AcceptGraph, CommitGraph, PrepareGraph, SearchGraph, tree_mask
from export.verify.comparison import Tensors
from export.verify.runner import GraphRunner
from export.verify.step import check_step, random_inputs, step_reference
from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec, TensorSpec
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from runtime.engines.kv_cache import SlabKVCache, fill_frame_mask, fill_tree_mask
from tests.lattice_oracles import ROOT, Prefix, brute_force, lattices, unmerged_lattices, walk_unmerged

# More than a tiny lattice has prefixes: at most 5 labels, up to 3 of them in each of 4 frames.
ALL_NODES = 250


def trees(lattice: Lattice, num_nodes: int) -> TokenTree:
    found = search(
        tensors_of(lattice),
        torch.tensor([[ROOT]]),
        merges_repeats=lattice.merges_repeats,
        num_nodes=num_nodes,
    )
    check_tree(found)
    values = (found.tokens, found.parents, found.depths, found.log_probs)
    return TokenTree(*(each[0].numpy() for each in values))


def check_tree(tree: TreeTensors) -> None:
    """Parents come first, siblings differ, depths and ancestors follow from the parents."""
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    siblings = set()
    for node, parent in enumerate(parents):
        if node and parent < 0:
            assert tree.log_probs[0, node] == -np.inf
            continue
        assert parent < node
        assert (parent, tokens[node]) not in siblings
        siblings.add((parent, tokens[node]))
        above = [node]
        while above[-1] > 0:
            above.append(parents[above[-1]])
        assert tree.depths[0, node] == len(above) - 1
        assert torch.nonzero(tree.ancestors[0, node]).flatten().tolist() == sorted(above)


def probabilities(tree: TokenTree) -> dict[Prefix, float]:
    nodes = [node for node in range(1, len(tree)) if tree.parents[node] >= 0]
    return {tuple(tree.path(node)): float(np.exp(tree.log_probs[node])) for node in nodes}


def check_all_prefixes(lattice: Lattice, expected: dict[Prefix, float]) -> None:
    found = probabilities(trees(lattice, ALL_NODES))
    for prefix in found.keys() | expected.keys():
        assert found.get(prefix, 0.0) == pytest.approx(expected.get(prefix, 0.0), rel=1e-4, abs=1e-6)


@settings(max_examples=60)
@given(lattice=lattices())
def test_merged_prefixes_equal_brute_force(lattice: Lattice) -> None:
    check_all_prefixes(lattice, brute_force(lattice))


@settings(max_examples=60)
@given(lattice=unmerged_lattices())
def test_prefixes_with_a_transition_equal_brute_force(lattice: Lattice) -> None:
    check_all_prefixes(lattice, walk_unmerged(lattice))


@settings(max_examples=60)
@given(lattice=st.one_of(lattices(), unmerged_lattices()), num_nodes=st.integers(1, 12))
def test_small_trees_are_trees(lattice: Lattice, num_nodes: int) -> None:
    """Ties and certain labels must not part a node from its parent."""
    trees(lattice, num_nodes)


def test_the_best_of_many_prefixes_are_found() -> None:
    """As many expected tokens as the exact search, of lattices with far more prefixes than are kept."""
    random = np.random.default_rng(3)
    shares = []
    for _ in range(25):
        lattice = random_lattice(random)
        exact = prefix_search(lattice, root_token=ROOT, num_nodes=512)
        true = probabilities(exact)
        found = sum(true.get(prefix, 0.0) for prefix in probabilities(trees(lattice, 8)))
        shares.append(found / float(np.exp(exact.log_probs[1:9]).sum()))
    assert np.mean(shares) > 0.995
    assert min(shares) > 0.97


def random_tree(random: np.random.Generator, size: int) -> TokenTree:
    parents = np.array([-1, *(random.integers(0, node) for node in range(1, size))])
    depths = np.zeros(size, np.int64)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(random.permutation(size), parents, depths, np.zeros(size))


def ancestors_of(tree: TokenTree) -> torch.Tensor:
    mask = np.empty((len(tree), len(tree)), np.bool_)
    fill_tree_mask(mask, tree.parents, 0)
    return torch.from_numpy(mask)[None]


def test_acceptance_walks_the_tree() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        tree = random_tree(random, int(random.integers(1, 10)))
        # Half of the nodes are followed by one of their children.
        choices = random.integers(0, 12, len(tree))
        path, bonus = tree.walk(choices.item)
        ids, parents, chosen = (torch.from_numpy(each)[None] for each in (tree.tokens, tree.parents, choices))
        accepted, counts, tokens = accept(ids, parents, ancestors_of(tree), chosen, 10)
        count = int(counts[0])
        assert accepted[0, :count].tolist() == path.tolist()
        assert accepted[0, count:].tolist() == list(range(count, 10))
        assert tokens[0, : count - 1].tolist() == tree.tokens[path[1:]].tolist()
        assert tokens[0, count - 1] == bonus


def test_a_missing_node_is_never_accepted() -> None:
    """Its token is the root's, which the model may well choose after the root."""
    ids, parents = torch.tensor([[5, 5]]), torch.tensor([[-1, -1]])
    _, counts, _ = accept(ids, parents, torch.eye(2, dtype=torch.bool)[None], torch.tensor([[5, 5]]), 2)
    assert counts.tolist() == [1]


def test_the_mask_of_a_tree_is_the_hosts() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        tree, length = random_tree(random, 7), int(random.integers(0, 20))
        expected = np.empty((7, 30), np.bool_)
        fill_tree_mask(expected, tree.parents, length)
        found = tree_mask(ancestors_of(tree), torch.tensor([length]), torch.arange(30))
        assert (found[0, 0].numpy() == expected).all()


SPEC = DrafterSpec("ctc", "parallel", 4, 3, 1, 2, 8, True, None)
MODEL = ModelSpec("m", "LlamaForCausalLM", 50, 16, 2, 2, 8, 64, 16, (0,), None, "", "")


def test_the_head_reads_its_context_as_on_the_host() -> None:
    lengths, counts = torch.tensor([9, 20]), torch.tensor([2, 5])
    inputs = {"lengths": lengths, "counts": counts, "positions": torch.arange(40)}
    names = ("context_position_ids", "frame_position_ids", "attn_mask", "write_index")
    contract = GraphSpec((), tuple(TensorSpec(name, (), "int64") for name in names))
    context, frames, mask, write_index = PrepareGraph(contract, SPEC, 5)(inputs, [])
    for row, (length, count) in enumerate(((9, 2), (20, 5))):
        start = length - count
        assert write_index[row] == start
        assert context[row, :count].tolist() == list(range(start, length))
        assert frames[row].tolist() == list(range(length, length + 4))
        expected = np.empty((4, 40), np.bool_)
        fill_frame_mask(expected, length, start + 5)
        assert (mask[row, 0].numpy() == expected).all()


def test_the_path_is_packed_as_on_the_host() -> None:
    random = np.random.default_rng(2)
    kv = SlabKVCache(num_layers=1, num_slots=2, num_kv_heads=2, head_dim=4, max_capacity=32)
    kv.slab[:] = random.normal(size=kv.slab.shape)
    past = [torch.from_numpy(layer.copy()) for layer in kv.slab]
    paths, counts, lengths = np.array([[0, 2, 5], [0, 1, 2]]), [3, 1], [4, 9]
    features = torch.from_numpy(random.normal(size=(2, 6, 3)))
    inputs = {"path": torch.from_numpy(paths), "lengths": torch.tensor(lengths), "features": features}
    found, *present = CommitGraph(scattered)(inputs, past)
    kv.commit(lengths, [path[:count] for path, count in zip(paths, counts, strict=True)])
    for layer, cache in enumerate(present):
        for slot, end in enumerate((7, 10)):
            assert (cache[slot, :, :end].numpy() == kv.slab[layer, slot, :, :end]).all()
    assert (found[0] == features[0, [0, 2, 5]]).all()


LATTICE = GraphSpec(
    (),
    (
        TensorSpec("frame_tokens", ("B", 4, 3), "int64"),
        TensorSpec("frame_logprobs", ("B", 4, 3), "float32"),
        TensorSpec("blank_logprobs", ("B", 4), "float32"),
    ),
)
TARGET = GraphSpec(
    tuple(TensorSpec(f"past_{kind}_0", ("B", 2, "S", 8), "float32") for kind in ("key", "value")),
    tuple(TensorSpec(f"present_{kind}_0", ("B", 2, "S", 8), "float32") for kind in ("key", "value")),
)


SEARCH = search_contract(lattice_inputs(LATTICE, SPEC), 4)


@pytest.mark.parametrize(
    ("module", "contract", "output"),
    [
        (
            SearchGraph(4, merges_repeats=True),
            SEARCH,
            "node_log_probs",
        ),
        (SearchGraph(4, merges_repeats=True), SEARCH, "parents"),
        (AcceptGraph(5), accept_contract(MODEL, 5, sampled=False), "path"),
        (CommitGraph(scattered), commit_contract(TARGET, MODEL, 5), "path_features"),
        (CommitGraph(scattered), commit_contract(TARGET, MODEL, 5), "present_value_0"),
    ],
)
def test_a_wrong_graph_is_refused(module: torch.nn.Module, contract: GraphSpec, output: str) -> None:
    names = [tensor.name for tensor in contract.outputs]
    past = [tensor.name for tensor in contract.inputs if tensor.name.startswith("past_")]

    def runner(change: Callable[[str, Any], Any]) -> GraphRunner:
        def execute(inputs: Tensors) -> Tensors:
            tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
            found = module(tensors, [tensors[name] for name in past])
            return {name: change(name, value.numpy()) for name, value in zip(names, found, strict=True)}

        return GraphRunner(execute, contract, Precision("float32"))

    right = runner(lambda name, value: value)
    examples = random_inputs(contract, right.capacity)
    reference = step_reference(module, contract, examples)
    assert check_step(right, examples, reference)["outputs"] == 0
    wrong = runner(lambda name, value: value + 1 if name == output else value)
    with pytest.raises(ExportError, match=r"differ|before its parent"):
        check_step(wrong, examples, reference)


@pytest.mark.parametrize(
    ("sizes", "config", "reason"),
    [
        ((8,), None, "without a draft head"),
        ((300,), DrafterConfig, "between 0 and 256"),
        ((200,), DrafterConfig, "takes 3840"),
        ((-1,), DrafterConfig, "between 0 and 256.*got -1"),
    ],
)
def test_sizes_that_no_step_can_have(
    sizes: tuple[int, ...], config: Any, reason: str, tiny_config: Any
) -> None:
    with pytest.raises(ExportError, match=reason):
        check_step_nodes(sizes, tiny_config if config else None, Options(), 256)


@pytest.fixture(scope="module")
def tiny_config(make_tiny_head: Callable[..., Any]) -> DrafterConfig:
    return make_tiny_head().config


def test_examples_of_plain_steps_are_roots() -> None:
    """Without a head the longest path is the root alone."""
    for inputs in random_inputs(accept_contract(MODEL, 1, sampled=False), capacity=64):
        assert (inputs["parents"] == -1).all()
        assert np.array_equal(inputs["ancestors"][0], np.eye(inputs["parents"].size, dtype=bool))

"""The kernels of a step, compiled for the host, against the exported graphs and the host's own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.experiments import step_kernels
from benchmarks.experiments.search_graph import random_lattices, tensors_of
from benchmarks.experiments.step_kernels import compare_graphs, compare_searches
from export.step.acceptance import BLOCK
from export.step.contracts import accept_contract, search_contract
from export.step.modules import SearchGraph
from export.verify.comparison import Tensors
from export.verify.host_kernels import DESCENDING, HostKernels, run_on_host
from export.verify.runner import Execute
from runtime.core.bundle import PARALLEL, Bundle, DrafterSpec, GraphSpec, ModelSpec, TensorSpec
from runtime.core.lattice import Lattice
from runtime.core.token_tree import TokenTree
from runtime.device.kernels.graphs import KernelEngine, graph_kernels
from tests.export.step.test_step_graphs import ALL_NODES, probabilities
from tests.export.step.test_step_sampling import (
    EVERY_FILTER,
    FAMILIES,
    as_arrays,
    count_differences,
    uniforms_of,
)
from tests.lattice_oracles import ROOT, brute_force, lattices, unmerged_lattices, walk_unmerged

# Threads of a block here. A GPU's blocks have more, which only take longer to switch between.
THREADS = 32
MODEL = ModelSpec("m", "LlamaForCausalLM", 50, 16, 2, 2, 8, 64, 16, (0,), None, "", "")


@pytest.fixture(scope="module", params=["ctc", "ctc-mlp", "hydra", "eagle"])
def bundle(request: pytest.FixtureRequest, step_bundle_of: Callable[[str], Path]) -> Bundle:
    return Bundle.load(step_bundle_of(request.param))


def test_every_graph_of_a_bundle(bundle: Bundle, host_kernels: HostKernels) -> None:
    """Batches of 1 to 8 sequences, each with threads and blocks in another order."""
    found = compare_graphs(bundle, host_kernels, passes=8)
    assert {name.partition("_")[0] for name in found} == {"prepare", "search", "accept", "commit"}
    for name, counts in found.items():
        assert counts.problems == [], name
        # Nodes of nearly the same probability may change places.
        assert counts.equal >= 0.99 * counts.sequences, name


def test_the_report_says_where_it_was_measured(
    step_bundle_of: Callable[[str], Path], host_kernels: HostKernels, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "few.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "How many?"}\n')
    arguments = ["--bundle", str(step_bundle_of("ctc")), "--prompts", str(prompts), "--out", str(out)]
    assert step_kernels.main([*arguments, "--passes", "1", "--random", "0", "--real", "2"]) == 0
    report = json.loads((out / "step_kernels.json").read_text())
    assert report.keys() == {"rows", "command", "machine", "versions", "bundle"}
    assert {row["problems"] for row in report["rows"]} == {0}
    assert sum(row["sequences"] for row in report["rows"] if "mean share" in row) == 2


def in_torch(contract: GraphSpec, num_nodes: int, merges_repeats: bool) -> Execute:
    """A search as torch computes it, which needs no tracing."""
    module = SearchGraph(num_nodes, merges_repeats=merges_repeats)

    @torch.no_grad()
    def execute(inputs: Tensors) -> Tensors:
        outputs = module({name: torch.from_numpy(values) for name, values in inputs.items()}, [])
        return {t.name: value.numpy() for t, value in zip(contract.outputs, outputs, strict=True)}

    return execute


def test_trees_of_random_lattices(host_kernels: HostKernels) -> None:
    """Frames with and without blanks, merged repeats and transitions; trees from 8 to 64 nodes."""
    sizes = (8, 16, 32, 64)
    found = compare_searches(random_lattices(120), host_kernels, in_torch, sizes)
    assert sum(counts.sequences for counts in found.values()) == 120
    for kind, counts in found.items():
        assert counts.problems == [], kind
        assert counts.equal >= counts.sequences - 1, kind


def pass_of(kernels: HostKernels, graph: str, contract: GraphSpec, inputs: Tensors) -> Tensors:
    of_graph = graph_kernels(graph, contract, None, threads=THREADS)
    assert of_graph
    return run_on_host(lambda device: KernelEngine(device, kernels, of_graph), contract, inputs)


def drawn(
    kernels: HostKernels, logits: NDArray[Any], uniforms: NDArray[Any], filters: Tensors
) -> NDArray[Any]:
    """The tokens that the kernels draw after nodes of which each is the only one of its sequence."""
    count, nodes, vocab_size = logits.shape
    rows = count * nodes
    model = ModelSpec("m", "M", vocab_size, 16, 2, 2, 8, 64, 16, (0,), None, "", "")
    zeros = np.zeros((rows, 1), np.int64)
    inputs = {
        "input_ids": zeros,
        "parents": zeros - 1,
        "ancestors": zeros[..., None] == 0,
        "depths": zeros,
        "logits": logits.reshape(rows, 1, vocab_size),
        "uniforms": uniforms.reshape(rows, 1),
        **{name: np.repeat(values, nodes) for name, values in filters.items()},
    }
    found = pass_of(kernels, "accept_sampled", accept_contract(model, 1, sampled=True), inputs)
    whole = torch.from_numpy(inputs["logits"][:, 0]).double().log_softmax(-1).numpy()
    expected = np.take_along_axis(whole, found["new_tokens"], 1)
    np.testing.assert_allclose(found["new_log_probs"], expected, rtol=2e-6, atol=4e-6)
    return found["new_tokens"].reshape(count, nodes)


def test_an_option_that_the_kernels_do_not_read_is_left_to_the_graph() -> None:
    contract = accept_contract(MODEL, 1, sampled=True)
    assert graph_kernels("accept_sampled", contract, None)
    option = TensorSpec("typical_p", ("B",), "float32")
    newer = msgspec.structs.replace(contract, inputs=(*contract.inputs, option))
    assert graph_kernels("accept_sampled", newer, None) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_the_hosts(family: str, host_kernels: HostKernels) -> None:
    """Combinations of filters, and vocabularies below, at and beside a whole number of blocks."""
    random = np.random.default_rng(0)
    num_drawn, differences = 0, 0
    params = EVERY_FILTER[::3]
    for vocab_size in (5, BLOCK, 2 * BLOCK + 1, 1501):
        logits = FAMILIES[family](random, (len(params), 1, vocab_size)).astype(np.float32)
        # No row may be excluded as a whole.
        logits[..., -1] = np.maximum(logits[..., -1], 0)
        uniforms = uniforms_of(random, (len(params), 1))
        tokens = drawn(host_kernels, logits, uniforms, as_arrays(params))
        differences += count_differences(logits, uniforms, params, tokens)
        num_drawn += tokens.size
    assert num_drawn > 400
    assert differences <= num_drawn // 400


def test_zeros_of_both_signs_are_level(host_kernels: HostKernels) -> None:
    logits = np.tile(np.array([-0.0, 0.0, -1.0], np.float32), (1, 40, 1))
    uniforms = np.linspace(0, 1, 40, endpoint=False, dtype=np.float32)[None]
    filters = as_arrays([EVERY_FILTER[0]]) | {"temperature": np.ones(1, np.float32), "top_k": np.array([1])}
    assert set(drawn(host_kernels, logits, uniforms, filters)[0]) == {0, 1}


@pytest.mark.parametrize("order", [DESCENDING, 7])
def test_a_path_that_is_longer_than_the_tree(order: int, host_kernels: HostKernels) -> None:
    """P may exceed N; places behind the tree repeat their number."""
    host_kernels.order = order
    inputs = {
        "input_ids": np.array([[5, 6]]),
        "parents": np.array([[-1, 0]]),
        "ancestors": np.array([[[True, False], [True, True]]]),
        "next_tokens": np.array([[6, 9]]),
    }
    found = pass_of(host_kernels, "accept", accept_contract(MODEL, 5, sampled=False), inputs)
    assert found["path"].tolist() == [[0, 1, 2, 3, 4]]
    assert found["new_counts"].tolist() == [2]
    assert found["new_tokens"].tolist() == [[6, 9, 0, 0, 0]]


@settings(max_examples=40)
@given(lattice=st.one_of(lattices(), unmerged_lattices()))
def test_all_prefixes_equal_brute_force(lattice: Lattice, host_kernels: HostKernels) -> None:
    """Tiny lattices, in which labels recur, and whose prefixes all fit."""
    tensors = tensors_of(lattice).present()
    drafts = [TensorSpec(name, ("B", *t.shape[1:]), str(t.numpy().dtype)) for name, t in tensors.items()]
    contract = search_contract(drafts, ALL_NODES)
    spec = DrafterSpec("ctc", PARALLEL, 1, 1, 1, 1, 1, lattice.merges_repeats, None)
    kernels = graph_kernels(f"search_{ALL_NODES}", contract, spec, threads=THREADS)
    assert kernels
    inputs = {name: tensor.numpy() for name, tensor in tensors.items()}
    inputs |= {"anchor_ids": np.array([[ROOT]]), "lengths": np.array([3]), "positions": np.arange(300)}
    found = run_on_host(lambda device: KernelEngine(device, host_kernels, kernels), contract, inputs)
    names = ("input_ids", "parents", "depths", "node_log_probs")
    prefixes = probabilities(TokenTree(*(found[name][0] for name in names)))
    expected = brute_force(lattice) if lattice.merges_repeats else walk_unmerged(lattice)
    for prefix in prefixes.keys() | expected.keys():
        assert prefixes.get(prefix, 0.0) == pytest.approx(expected.get(prefix, 0.0), rel=1e-4, abs=1e-6)

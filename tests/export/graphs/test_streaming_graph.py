"""Speculative streams as a graph: it equals the modules, with and without pruning, and compiles."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from drafters.streaming import StreamFrames
from export.errors import ExportError
from export.graphs.contracts import streaming_contract
from export.graphs.modules import keep_nodes
from export.options import Options
from export.source import load_source
from export.verify.runner import GraphRunner
from export.verify.target_model import check_streaming, path_scores, streaming_reference
from runtime.core.bundle import Bundle, GraphSpec
from tests.stream_heads import HEADS, NUM_FRAMES

CHECKS = {"prefill", "tree", "pruned", "equal_argmax"}


def load_head(model_dir: Path, bundle: Path) -> StreamFrames:
    head = load_source(model_dir, bundle.parent / "head").drafter
    assert isinstance(head, StreamFrames)
    return head


@pytest.fixture(scope="module", params=list(HEADS))
def bundle(request: pytest.FixtureRequest, stream_bundle_of: Callable[[str], Path]) -> Path:
    return stream_bundle_of(request.param)


def test_the_graph_is_the_module(
    bundle: Path, tiny_model_dir: Path, open_graph: Callable[[Path, str], GraphRunner]
) -> None:
    """On another prompt and other trees than the build's own check."""
    manifest = Bundle.load(bundle).manifest
    spec = manifest.drafter
    assert spec is not None
    assert (spec.family, spec.has_streams, spec.num_frames) == ("streaming", True, NUM_FRAMES)
    assert set(manifest.validation["streaming"]) == CHECKS
    head = load_head(tiny_model_dir, bundle)
    reference = streaming_reference(head, width=spec.top_k, seed=5)
    assert set(reference.after_prompt.lattice) == {
        tensor.name for tensor in manifest.graphs["streaming"].outputs if len(tensor.shape) > 2
    } - {"logits"} - {t.name for t in manifest.graphs["streaming"].outputs if "present" in t.name}
    found = check_streaming(open_graph(bundle, "streaming"), reference)
    assert found.pop("equal_argmax") == 1
    assert max(found.values()) < 1e-4


def test_interface_is_the_contract(
    bundle: Path, tiny_model_dir: Path, assert_interface: Callable[[Path, GraphSpec], None]
) -> None:
    manifest = Bundle.load(bundle).manifest
    assert manifest.drafter is not None
    contract = streaming_contract(manifest.model, load_head(tiny_model_dir, bundle).config, manifest.drafter)
    assert manifest.graphs["streaming"] == contract
    assert_interface(bundle / "streaming.onnx", contract)


def test_what_the_graph_is_made_of(bundle: Path) -> None:
    graph = onnx.load(bundle / "streaming.onnx", load_external_data=False)
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 24)}
    kinds = [node.op_type for node in graph.graph.node]
    # A row's query is rotated once, whether it is a node's or a stream's, and with its key where both are
    # parts of one product; streams with adapters of their own add to these in the upper layer.
    assert (kinds.count("Attention"), kinds.count("Softmax"), kinds.count("TensorScatter")) == (0, 0, 4)
    assert kinds.count("RotaryEmbedding") == (3 if bundle.parent.name.endswith("streaming") else 2)
    # What TensorRT refuses, and the search of labels, the one place where something is sorted.
    assert not {"NonZero", "Unique", "Loop", "ScatterElements", "ScatterND"} & set(kinds)
    assert kinds.count("TopK") == 1
    # An early exit, the last layer and the streams read one LM head.
    shapes = [tuple(tensor.dims) for tensor in graph.graph.initializer]
    assert shapes.count((64, 258)) == 1


@pytest.mark.parametrize(
    "name", ["stream_embeddings", "start.down.weight", "lora.0.v_proj.A.weight", "exit_adapter.B.weight"]
)
def test_a_wrong_weight_is_found(
    name: str,
    stream_bundle_of: Callable[[str], Path],
    tiny_model_dir: Path,
    open_graph: Callable[[Path, str], GraphRunner],
) -> None:
    bundle = stream_bundle_of("streaming")
    head = load_head(tiny_model_dir, bundle)
    weight = head.get_parameter(name)
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 5)
    wrong = streaming_reference(head, width=Options.top_k)
    with pytest.raises(ExportError, match=r"streaming.*(differs? from PyTorch|keeps the nodes)"):
        check_streaming(open_graph(bundle, "streaming"), wrong)


def random_tree(random: np.random.Generator, size: int) -> NDArray[np.int64]:
    return np.array([-1, *(random.integers(0, node) for node in range(1, size))])


def test_kept_nodes_are_the_best_and_a_tree() -> None:
    """Against path scores summed in Python; ties and padding too."""
    random = np.random.default_rng(0)
    size, vocab = 11, 5
    for case in range(30):
        real = size - case % 3
        parents = random_tree(random, size)
        parents[real:] = 0
        tokens = random.integers(0, vocab, size)
        logits = random.integers(-2, 3, (size, vocab)).astype(np.float32)
        if case % 2:
            # Nodes that are certain are level with their parents.
            logits[:, :] = [-1e4, -1e4, -1e4, 0, -1e4]
        ancestors = np.eye(size, dtype=np.bool_)
        for node in range(1, real):
            ancestors[node] |= ancestors[parents[node]]
        for kept in range(1, size + 1):
            kept_nodes, kept_places = keep_nodes(
                torch.from_numpy(logits)[None],
                torch.from_numpy(tokens)[None],
                torch.from_numpy(parents)[None],
                torch.from_numpy(ancestors)[None],
                torch.arange(kept),
            )
            nodes = kept_nodes[0].numpy()
            assert (np.diff(nodes) > 0).all()
            assert nodes[0] == 0
            of_tree = nodes[nodes < real]
            assert of_tree.size == min(kept, real)
            assert {int(parents[node]) for node in of_tree[1:]} <= set(of_tree.tolist())
            scores = path_scores(tokens[:real], list(logits), parents[:real])
            best = np.sort(scores)[::-1][: of_tree.size]
            np.testing.assert_allclose(np.sort(scores[of_tree])[::-1], best, atol=1e-3)
            places = kept_places[0].numpy()
            assert (places[nodes] == np.arange(kept)).all()


@pytest.mark.parametrize(("stream_pass", "name"), [("verify", "streaming"), ("own", "drafter")])
def test_compiles_with_tensorrt(
    stream_pass: str,
    name: str,
    stream_bundle_of: Callable[[str], Path],
    own_pass_bundle_of: Callable[[str], Path],
    tiny_model_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    """In half precision, once the very file agrees with PyTorch."""
    pytest.importorskip(
        "tensorrt_rtx_bindings",
        reason="TensorRT for RTX has no wheel for this platform",
        exc_type=ImportError,
    )
    from export.forms import GraphForm
    from export.heads import prepare_drafter, step_sizes
    from export.pipeline import write_graph
    from export.quantisation.precision import Precision
    from export.trt.compiler import compile_engine, load_library
    from export.trt.plan import draft_plan, drafter_capacity, drafter_profiles
    from export.verify.runner import onnx_runner

    options = Options(max_batch=4, stream_pass=stream_pass)
    source = load_source(tiny_model_dir, stream_bundle_of("ctc").parent / "head")
    head = source.drafter
    assert head is not None
    plan = draft_plan(source.spec, options)
    # Only streams in a pass of their own run in steps on a device.
    assert (step_sizes(head.config, options, plan.max_nodes) == (0,)) == (stream_pass == "verify")
    prepared = prepare_drafter(head, options, source.spec)
    form = GraphForm(Precision("float16"), "float16", drafter_capacity(plan, head.config, options))
    bundle = (own_pass_bundle_of if stream_pass == "own" else stream_bundle_of)("ctc")
    with copied_graphs(**{name: bundle}):
        graph, _ = write_graph(
            prepared.module, prepared.contract, tmp_path / f"{name}.onnx", form, lambda message: None
        )
    features = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    check: Any = prepared.check(features)
    differences = check(onnx_runner(graph.path, graph.contract, graph.precision))
    assert differences.pop("equal_argmax") > 0.7
    assert max(differences.values()) > 1e-4  # half precision it is
    profiles = drafter_profiles(plan, head.config, options, graph.contract)
    library = load_library("tensorrt-rtx")
    engine = compile_engine(library, graph.path, graph.contract, profiles, capabilities=("sm89",))
    assert engine.plan

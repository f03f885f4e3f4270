"""Every supported family: the graph against PyTorch, and what the graph is made of."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.graphs.contracts import target_model_contract
from export.source import load_source
from export.verify.comparison import TOLERANCES, Tensors
from export.verify.runner import GraphRunner
from export.verify.target_model import check_target_model, target_model_reference
from runtime.core.bundle import Bundle, GraphSpec
from runtime.engines.operators import operator_library
from runtime.engines.ort import key_block
from runtime.engines.protocol import UNBROKEN
from runtime.load.host import load_target_model

# Of one model in float32 at batch 1 and batch 2: another order of summation, nothing else.
BATCH_TOLERANCE = 1e-4
CAPACITY = 32


@pytest.fixture(scope="module")
def graph(exported: Any) -> onnx.ModelProto:
    return onnx.load(exported.bundle.path / "backbone.onnx", load_external_data=False)


def test_agrees_with_pytorch_on_new_inputs(
    exported: Any, open_graph: Callable[[Path, str], GraphRunner]
) -> None:
    source = load_source(exported.model_dir, exported.drafter_dir)
    found = check_target_model(
        open_graph(exported.bundle.path, "backbone"), target_model_reference(source, seed=1)
    )
    stored = dict(exported.bundle.manifest.validation["backbone"])
    assert set(stored) == set(found) == {"prefill", "tree", "equal_argmax"}
    assert found.pop("equal_argmax") == stored.pop("equal_argmax") == 1
    assert all(0 < value < 100 * TOLERANCES["float32"] for value in (*found.values(), *stored.values()))


def test_sequences_of_a_batch_are_independent(exported: Any) -> None:
    """Two sequences of different lengths in one step give what each gives alone."""
    spec = exported.bundle.manifest.model
    session = ort.InferenceSession(exported.bundle.path / "backbone.onnx", _quiet())
    names = [output.name for output in session.get_outputs()]
    random = np.random.default_rng(0)
    lengths, count = (5, 11), 3
    prompts = [random.integers(0, spec.vocab_size, length) for length in lengths]
    steps = random.integers(0, spec.vocab_size, (2, count))

    def run(tokens: NDArray[Any], starts: list[int], past: Tensors) -> tuple[Tensors, Tensors]:
        sequences, width = tokens.shape
        mask = np.zeros((sequences, 1, width, CAPACITY), np.bool_)
        for sequence, start in enumerate(starts):
            mask[sequence, 0, :, :start] = True
            mask[sequence, 0, :, start : start + width] = np.tri(width, dtype=np.bool_)
        feeds = {
            "input_ids": tokens,
            "position_ids": np.array(starts)[:, None] + np.arange(width),
            "attn_mask": mask,
            "write_index": np.array(starts),
            "logit_indices": np.tile(np.arange(width), (sequences, 1)),
        }
        outputs = dict(zip(names, session.run(None, {**feeds, **past}), strict=True))
        cache = {f"past_{k[8:]}": v for k, v in outputs.items() if k.startswith("present_")}
        return outputs, cache

    zeros = np.zeros((1, spec.num_kv_heads, CAPACITY, spec.head_dim), np.float32)
    empty = {f"past_{kind}_{i}": zeros for i in range(spec.num_layers) for kind in ("key", "value")}
    caches = [run(prompt[None], [0], empty)[1] for prompt in prompts]
    alone = [run(steps[i : i + 1], [lengths[i]], caches[i])[0] for i in range(2)]
    together, _ = run(steps, list(lengths), {k: np.concatenate([c[k] for c in caches]) for k in caches[0]})
    last = spec.num_layers - 1
    for name in ("logits", "features", f"present_key_{last}", f"present_value_{last}"):
        expected = np.concatenate([outputs[name] for outputs in alone])
        np.testing.assert_allclose(
            together[name], expected, rtol=0, atol=BATCH_TOLERANCE * np.abs(expected).max(), err_msg=name
        )
    assert together["next_tokens"].tolist() == together["logits"].argmax(-1).tolist()


def test_standard_operators_only(graph: onnx.ModelProto) -> None:
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 24)}
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert not graph.functions


def test_fused_operators(exported: Any, graph: onnx.ModelProto) -> None:
    case, layers = exported.case, exported.bundle.manifest.model.num_layers
    counts = Counter(node.op_type for node in graph.graph.node)
    assert counts["RMSNormalization"] == case.norms_per_layer * layers + 1
    rotated = layers if case.rotated_layers is None else case.rotated_layers
    assert counts["RotaryEmbedding"] == case.rotations * rotated
    assert counts["Cos"] == counts["Sin"] == case.rotary_bases
    assert counts["TensorScatter"] == 2 * layers
    assert counts["Attention"] == (layers if case.attention in ("fused", "grouped") else 0)
    assert counts["Softmax"] == (layers if case.attention == "primitive" else 0) + case.routers
    assert counts["TopK"] == case.routers


def test_rows_have_the_same_bits_in_every_pass(exported: Any) -> None:
    bundle: Bundle = exported.bundle
    assert bundle.manifest.row_invariant == (exported.case.attention == "invariant")
    target_model = load_target_model(bundle, max_nodes=32, max_num_seqs=2, num_threads=1)
    assert (target_model.key_block is not None) == bundle.manifest.row_invariant


def test_attention_of_every_layer_has_a_compiled_form(exported: Any) -> None:
    bundle: Bundle = exported.bundle
    name = "backbone.compiled.onnx"
    if exported.case.attention != "invariant":
        assert name not in bundle.manifest.files
        return
    found = onnx.load(bundle.path / name, load_external_data=False).graph
    kinds = Counter(node.op_type for node in found.node)
    assert kinds["TreeAttention"] + kinds["RotaryTreeAttention"] == bundle.manifest.model.num_layers
    assert kinds["TensorScatter"] == 0
    assert load_target_model(bundle, max_nodes=4, num_threads=1).key_block == (
        UNBROKEN if operator_library() else key_block(bundle.manifest.model.head_dim)
    )


def test_interface_is_the_contract(
    exported: Any, assert_interface: Callable[[Path, GraphSpec], None]
) -> None:
    contract = target_model_contract(exported.bundle.manifest.model)
    assert exported.bundle.manifest.graphs["backbone"] == contract
    assert_interface(exported.bundle.path / "backbone.onnx", contract)


def test_cache_goes_straight_through_the_scatter(graph: onnx.ModelProto) -> None:
    """A scatter's input and output are the graph's own, so a runtime can update the cache in place."""
    scatters = {node.output[0]: node for node in graph.graph.node if node.op_type == "TensorScatter"}
    presents = [output.name for output in graph.graph.output if output.name.startswith("present_")]
    assert sorted(presents) == sorted(scatters)
    for present in presents:
        node = scatters[present]
        assert node.input[0] == present.replace("present_", "past_")
        assert node.input[2] == "write_index"
        assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}["axis"] == 2


def test_weights_are_external_and_written_once(exported: Any, graph: onnx.ModelProto) -> None:
    directory = exported.bundle.path
    large = [tensor for tensor in graph.graph.initializer if int(np.prod(tensor.dims)) > 1000]
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in large)
    full = onnx.load(directory / "backbone.onnx")
    contents = []
    for tensor in full.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.size > 1000:
            contents += [array.tobytes(), np.ascontiguousarray(array.T).tobytes()]
    assert len(set(contents)) == len(contents), "a weight is stored twice, maybe transposed"
    vocabulary = [t for t in large if exported.bundle.manifest.model.vocab_size in t.dims]
    assert len(vocabulary) == (1 if exported.case.tied else 2)
    model = exported.bundle.manifest.model
    weights = (directory / "backbone.onnx.data").stat().st_size
    assert weights < sum(f.stat().st_size for f in exported.model_dir.glob("*.safetensors")) * 1.05
    assert model.feature_size % model.hidden_size == 0


def test_graph_says_nothing_of_the_machine_that_built_it(exported: Any, graph: onnx.ModelProto) -> None:
    assert str(exported.model_dir.parent) not in str(graph)
    assert not any(node.metadata_props or node.doc_string for node in graph.graph.node)


def _quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return options

"""The pass from float32 graphs to half precision: which values keep their precision, and what it computes."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from export.quantisation.half_precision import IR_TYPES, cast_graph
from export.quantisation.precision import Precision, tensors_in
from export.verify.runner import GraphRunner, cast_up, onnx_runner
from runtime.core.bundle import Bundle, GraphSpec


def half_graph(
    bundle: Path, name: str, dtype: str, features: str | None = None
) -> tuple[ir.Model, GraphSpec]:
    model = ir.load(bundle / f"{name}.onnx")
    contract = Bundle.load(bundle).manifest.graphs[name]
    contract = tensors_in(contract, dtype, features=features or dtype, capacity=None)
    cast_graph(model, dtype, contract)
    return model, contract


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_keeps_its_precision(tiny_bundle_dir: Path, dtype: str) -> None:
    model, contract = half_graph(tiny_bundle_dir, "backbone", dtype)
    drafter, _ = half_graph(tiny_bundle_dir, "drafter", dtype)
    exact, half = IR_TYPES["float32"], IR_TYPES[dtype]
    types = {"logits": exact, "features": half, "present_key_0": half, "past_value_1": half}
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    assert {name: values[name].dtype for name in types} == types
    # The caches go straight through the scatter.
    for value in model.graph.outputs:
        if value.name and value.name.startswith("present_"):
            producer = value.producer()
            assert producer is not None
            assert producer.op_type == "TensorScatter"
            assert producer.inputs[0] in model.graph.inputs
    for kind, expected in (("Cos", exact), ("Sin", exact), ("RotaryEmbedding", half), ("Attention", half)):
        graph = drafter.graph if kind == "Attention" else model.graph
        nodes = [node for node in graph if node.op_type == kind]
        inputs = [value for node in nodes for value in node.inputs if value is not None]
        assert {value.dtype for value in inputs if value.dtype in (exact, half)} == {expected}, kind
    weights = [w for w in model.graph.initializers.values() if w.dtype in (exact, half) and w.const_value]
    assert all(weight.dtype == half for weight in weights if len(weight.shape or ()) == 2)
    assert {tensor.dtype for tensor in contract.inputs} == {"int64", "bool", dtype}


def test_log_probabilities_are_computed_in_float32(tiny_bundle_dir: Path) -> None:
    model, _ = half_graph(tiny_bundle_dir, "drafter", "float16")
    exact = IR_TYPES["float32"]
    values = {value.name: value for value in model.graph.outputs}
    for name in ("frame_logprobs", "blank_logprobs"):
        assert values[name].dtype == exact
    sums = [node for node in model.graph if node.op_type in ("Exp", "Log", "ReduceSum", "LogSoftmax")]
    assert sums
    assert all(value.dtype == exact for node in sums for value in node.outputs)


def test_a_head_may_read_features_of_another_type(tiny_bundle_dir: Path) -> None:
    """A float32 head of a target model in half precision casts what it reads, and nothing else."""
    model, contract = half_graph(tiny_bundle_dir, "drafter", "float32", features="float16")
    before = ir.load(tiny_bundle_dir / "drafter.onnx")
    assert contract.inputs[0].dtype == "float16"
    assert model.graph.inputs[0].dtype == IR_TYPES["float16"]
    assert len(list(model.graph)) == len(list(before.graph)) + 1


def test_numbers_beyond_the_range_become_its_largest(tiny_bundle_dir: Path) -> None:
    """Minus 1e30 in place of masked scores would be minus infinity, and a row of these not a number."""
    model = ir.load(tiny_bundle_dir / "backbone.onnx")
    weight = next(w for w in model.graph.initializers.values() if w.name and "norm" in w.name)
    assert weight.const_value is not None
    weight.const_value = ir.tensor(np.full(weight.const_value.shape.numpy(), -1e30, np.float32))
    contract = Bundle.load(tiny_bundle_dir).manifest.graphs["backbone"]
    cast_graph(model, "float16", tensors_in(contract, "float16", features="float16", capacity=None))
    found = [w for w in model.graph.initializers.values() if w.name == f"{weight.name}_float16"]
    assert found[0].const_value is not None
    assert (found[0].const_value.numpy() == -65504).all()


def test_a_graph_that_is_cast_up_computes_with_the_same_weights(
    tiny_bundle_dir: Path, tmp_path: Path
) -> None:
    model, contract = half_graph(tiny_bundle_dir, "backbone", "bfloat16")
    ir.save(model, tmp_path / "half.onnx")
    cast_up(model)
    kept = {w.name: w for w in model.graph.initializers.values()}
    name = next(name for name in kept if name and "embed_tokens" in name)
    weights = kept[name].const_value
    assert weights is not None
    rounded = weights.numpy()
    assert (rounded == rounded.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    runner = onnx_runner(tmp_path / "half.onnx", contract, Precision("bfloat16"))
    assert isinstance(runner, GraphRunner)
    outputs = runner.run(
        input_ids=np.array([3]),
        position_ids=np.array([0]),
        attn_mask=np.arange(runner.capacity)[None, None] < 1,
        write_index=np.array(0),
        logit_indices=np.array([0]),
    )
    assert np.isfinite(outputs["logits"]).all()

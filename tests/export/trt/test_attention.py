"""Attention that reads the caches in place, as NVIDIA's compiler reports its memory."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM

from export.forms import GraphForm
from export.graphs.contracts import target_model_contract
from export.graphs.modules import TargetModelGraph
from export.options import FUSED
from export.pipeline import write_graph
from export.quantisation.precision import Precision
from export.trt.compiler import compile_engine, load_library, read_caches_in_place
from export.trt.plan import (
    backbone_capacity,
    backbone_profiles,
    drafter_reads_in_place,
    target_model_reads_in_place,
)
from runtime.core.bundle import EnginePlan, ModelSpec
from runtime.device.tensorrt import ATTENTION_QUERY

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)


def activation_bytes(directory: Path, *, sliced: bool) -> int:
    """What the builder reports for a Llama with 32 query heads and 8 key heads of 128."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    spec = ModelSpec("random", "llama", 256, 512, 2, 8, 128, 4096, 512, (), None, "", "")
    plan = EnginePlan(max_context=4096, max_num_seqs=4, max_nodes=8, prefill_chunk=64)
    module = TargetModelGraph(LlamaForCausalLM(config).eval(), (1,), plan.max_context, FUSED)
    form = GraphForm(Precision("float16"), "float16", backbone_capacity(plan, None), sliced=sliced)
    contract = target_model_contract(spec)
    graph, _ = write_graph(module, contract, directory / "backbone.onnx", form, lambda _: None)
    module.close()
    profiles = backbone_profiles(plan, None, graph.contract)
    library = load_library("tensorrt-rtx")
    engine = compile_engine(library, graph.path, graph.contract, profiles, capabilities=("sm89",))
    return engine.activation_bytes


def test_a_pass_needs_no_copy_of_keys_and_values(tmp_path: Path) -> None:
    """Less than the keys of one layer have, 32 MiB. A pass that reads a part of its caches copies them."""
    keys = 4 * 8 * 4096 * 128 * 2
    assert activation_bytes(tmp_path, sliced=False) < keys < activation_bytes(tmp_path, sliced=True)


def test_every_attention_has_the_lengths_of_its_own_cache() -> None:
    """In a graph with streams, upper layers write more positions than lower ones."""
    library = load_library("tensorrt-rtx")
    trt = library.trt
    network = trt.Builder(library.log).create_network(0)
    first = network.add_input("write_index", trt.int32, (2,))
    for name, rows in (("lower", 3), ("upper", 5)):
        shapes = {"past": (2, 2, 64, 16), "keys": (2, 2, rows, 16), "query": (2, 4, rows, 16)}
        past, keys, query = (
            network.add_input(f"{name}_{kind}", trt.float16, shape) for kind, shape in shapes.items()
        )
        update = network.add_kv_cache_update(past, keys, first, trt.KVCacheMode.LINEAR).get_output(0)
        network.add_attention(query, update, update, trt.AttentionNormalizationOp.SOFTMAX, False)
    read_caches_in_place(trt, network)
    producers = {}
    lengths = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        producers[layer.get_output(0).name] = layer
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            lengths.append(layer.attention.key_value_lengths)
    counted = []
    for total in lengths:
        tensor = producers[total.name].get_input(1)
        while tensor.name in producers:
            tensor = producers[tensor.name].get_input(0)
        counted.append(tensor.name)
    assert counted == ["lower_keys", "upper_keys"]
    queries = [network.get_output(index).name for index in range(network.num_outputs)]
    assert queries == [f"{ATTENTION_QUERY}0", f"{ATTENTION_QUERY}1"]


@pytest.mark.parametrize(
    ("config", "activations", "attention", "expected"),
    [
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float16", None, True),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "bfloat16", "fused", True),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float32", None, False),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float16", "grouped", False),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=8), "float16", None, False),
        (Gemma2Config(), "float16", None, False),
    ],
)
def test_which_models_read_in_place(
    config: Any, activations: str, attention: str | None, expected: bool
) -> None:
    assert target_model_reads_in_place(config, activations, attention) == expected


def test_which_heads_read_in_place(make_tiny_head: Any) -> None:
    head = make_tiny_head()
    assert drafter_reads_in_place(head.config, "float16", None) == (
        head.config.num_kv_heads < head.config.num_heads
    )

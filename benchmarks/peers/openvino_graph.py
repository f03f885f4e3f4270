"""A model of Hugging Face as the stateful graph that OpenVINO GenAI runs, in float32.

Intel's converter, optimum-intel, has no release for the Transformers that this project uses. OpenVINO's own
``convert_model`` traces the model. What optimum-intel would add is done here: names, an input that reorders
the cache, and the cache as a state of the graph.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GRAPH_NAME = "openvino_model.xml"


class CachedStep(nn.Module):
    """A forward pass whose keys and values are plain inputs and outputs, as a trace needs them."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor) -> Any:
        """input_ids, position_ids [B, N], attention_mask [B, S + N], past 2L times [B, K, S, D].

        Returns logits [B, N, V] and 2L times [B, K, S + N, D].
        """
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        # The constructor would append the past to empty tensors, which OpenVINO cannot express.
        cache.layers = [_filled_layer(*layer) for layer in zip(past[::2], past[1::2], strict=True)]
        columns = torch.arange(attention_mask.shape[1])
        rows = attention_mask.shape[1] - input_ids.shape[1] + torch.arange(input_ids.shape[1])
        mask = (columns[None, :] <= rows[:, None])[None, None] & attention_mask[:, None, None, :].bool()
        output = self.model(
            input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        present = [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]
        return output.logits, *present


def _filled_layer(keys: Tensor, values: Tensor) -> Any:
    from transformers.cache_utils import DynamicLayer

    layer: Any = DynamicLayer()
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    return layer


def write_graph(model_dir: Path, out: Path) -> None:
    """Write ``openvino_model.xml`` with its weights."""
    import openvino as ov
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    config = model.config
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = tuple(torch.zeros(1, heads, 3, width) for _ in range(2 * config.num_hidden_layers))
    ids = torch.tensor([[1, 2]])
    example = (ids, torch.ones(1, 5, dtype=torch.int64), torch.tensor([[3, 4]]), *past)
    with torch.no_grad():
        graph = ov.convert_model(CachedStep(model.eval()), example_input=example)
    name_tensors(graph, heads, width)
    make_stateful(graph)
    ov.save_model(graph, out / GRAPH_NAME, compress_to_fp16=False)


def name_tensors(graph: Any, heads: int, width: int) -> None:
    """Give inputs and outputs the names by which OpenVINO GenAI finds them, and free the sizes that vary."""
    import openvino as ov

    names = ["input_ids", "attention_mask", "position_ids"]
    layers = (len(graph.inputs) - len(names)) // 2
    parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    names += [f"past_key_values.{part}" for part in parts]
    for index, (tensor, name) in enumerate(zip(graph.inputs, names, strict=True)):
        tensor.get_tensor().set_names({name})
        parameter = tensor.get_node()
        parameter.set_friendly_name(name)
        shape = [-1, -1] if index < 3 else [-1, heads, -1, width]
        parameter.set_partial_shape(ov.PartialShape(shape))
    for tensor, name in zip(graph.outputs, ["logits", *(f"present.{part}" for part in parts)], strict=True):
        tensor.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


def make_stateful(graph: Any) -> None:
    """Turn the cache into a state of the graph, which ``beam_idx`` [B] reorders before each pass."""
    from openvino import PartialShape, Type
    from openvino import opset13 as opset
    from openvino._offline_transformations import apply_make_stateful_transformation

    order = opset.parameter(name="beam_idx", dtype=Type.i32, shape=PartialShape([-1]))
    order.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([order])
    past = [tensor for tensor in graph.inputs if tensor.get_any_name().startswith("past_key_values")]
    for tensor in past:
        consumers = tensor.get_target_inputs()
        ordered = opset.gather(tensor, order, opset.constant(0))
        for consumer in consumers:
            consumer.replace_source_output(ordered.output(0))
    graph.validate_nodes_and_infer_types()
    pairs = {
        name: name.replace("past_key_values", "present")
        for name in (tensor.get_any_name() for tensor in past)
    }
    apply_make_stateful_transformation(graph, pairs)
    _begin_empty(graph, opset)


def _begin_empty(graph: Any, opset: Any) -> None:
    """Let every state begin with no positions, for as many texts as there are."""
    batch = opset.gather(
        opset.shape_of(graph.input("input_ids"), output_type="i64"), opset.constant([0]), opset.constant(0)
    )
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            sizes = [size.get_min_length() for size in list(node.get_output_partial_shape(0))]
            parts = [batch] + [opset.constant([size], dtype="int64") for size in (sizes[1], 0, sizes[3])]
            empty = opset.broadcast(
                opset.constant(0.0, dtype=node.get_output_element_type(0)), opset.concat(parts, 0)
            )
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()

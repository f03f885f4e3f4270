"""Attention for which NVIDIA's compiler plans no copy of the keys and values in the caches."""

from typing import Any

from transformers import PretrainedConfig

from drafters.config import DrafterConfig
from export.options import FUSED
from runtime.device.tensorrt import ATTENTION_QUERY

HALF = ("float16", "bfloat16")


def target_model_reads_in_place(config: PretrainedConfig, activations: str, attention: str | None) -> bool:
    """Whether passes of a target model read its whole caches in place.

    Otherwise passes copy the keys and values that they read, so they should read a part (``slice_caches``).
    TensorRT's kernels read in place where several query heads share keys. Attention with a soft cap on its
    scores is made of other operators.

    activations: the type of the caches
    attention: a form of ``export.options.ATTENTION``, or None for the target's default
    """
    num_heads = config.num_attention_heads
    has_groups = (getattr(config, "num_key_value_heads", None) or num_heads) < num_heads
    softcap = getattr(config, "attn_logit_softcapping", None)
    return has_groups and softcap is None and _has_kernels(activations, attention)


def drafter_reads_in_place(config: DrafterConfig, activations: str, attention: str | None) -> bool:
    """The same for passes of a draft head."""
    return config.num_kv_heads < config.num_heads and _has_kernels(activations, attention)


def _has_kernels(activations: str, attention: str | None) -> bool:
    return activations in HALF and attention in (None, FUSED)


def read_caches_in_place(trt: Any, network: Any) -> None:
    """Let the attention of a parsed network read whole caches in place, up to the length in use.

    Each query becomes an output of the network. Where the compiler (TensorRT for RTX 1.7) may merge the
    computation of the query into attention, the memory it reports has room for keys and values of every
    query head; this way it has none for them (``benchmarks.experiments.attention_memory``). Kernels also
    learn how many positions of each sequence hold keys, so that they need not read the others.
    """
    producers = {}
    attentions = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for output in range(layer.num_outputs):
            producers[layer.get_output(output).name] = layer
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            attentions.append(layer)

    def unscaled(tensor: Any) -> tuple[Any, list[Any]]:
        """What the parser multiplied by a root of the scale, and that root, if it did."""
        product = producers.get(tensor.name)
        if product is None or product.type != trt.LayerType.ELEMENTWISE:
            return tensor, []
        factor = product.get_input(1)
        return (product.get_input(0), [factor]) if tuple(factor.shape) == (1, 1, 1, 1) else (tensor, [])

    for index, layer in enumerate(attentions):
        (query, of_query), (key, of_key) = unscaled(layer.get_input(0)), unscaled(layer.get_input(1))
        update = producers.get(key.name)
        if update is None or update.type != trt.LayerType.KV_CACHE_UPDATE or query.shape[1] == key.shape[1]:
            continue
        query = _add_scaled(trt, network, query, [*of_query, *of_key])
        query.name = f"{ATTENTION_QUERY}{index}"
        network.mark_output(query)
        layer.set_input(0, query)
        layer.set_input(1, key)
        if not hasattr(trt.IAttention, "key_value_lengths"):  # an older TensorRT
            continue
        layer.__class__ = trt.IAttentionInputLayer
        # Not all layers write as many positions: the upper ones of a graph with streams write more.
        lengths = _add_lengths(trt, network, update.get_input(2), update.get_input(1))
        layer.attention.key_value_lengths = lengths


def _add_scaled(trt: Any, network: Any, query: Any, factors: list[Any]) -> Any:
    """The query times all factors, in float32: the compiler fails at such an output in bfloat16."""
    product = network.add_cast(query, trt.float32).get_output(0)
    for factor in factors:
        factor = network.add_cast(factor, trt.float32).get_output(0)
        product = network.add_elementwise(product, factor, trt.ElementWiseOperation.PROD).get_output(0)
    return network.add_cast(product, query.dtype).get_output(0)


def _add_lengths(trt: Any, network: Any, first: Any, keys: Any) -> Any:
    """Positions in use [B] int32 after an update with keys [B, H, N, D] from positions ``first`` [B]."""
    shape = network.add_shape(keys).get_output(0)
    count = network.add_slice(shape, (2,), (1,), (1,)).get_output(0)
    first, count = (network.add_cast(each, trt.int32).get_output(0) for each in (first, count))
    return network.add_elementwise(first, count, trt.ElementWiseOperation.SUM).get_output(0)

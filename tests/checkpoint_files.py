"""Write tiny quantised checkpoints, with packing of the tests' own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The name that llama.cpp has for a weight of Transformers."""
    base = name.removesuffix(".weight")
    if base in OTHER_NAMES:
        return f"{OTHER_NAMES[base]}.weight"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def permuted(weight: Array, num_heads: int) -> Array:
    """The rows of queries or keys as llama.cpp orders them: pairs of a rotation side by side."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: Path,
    path: Path,
    form: str,
    *,
    split: str = "gpt-2",
    extra: dict[str, Array] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a Llama's directory as a GGUF file whose matrices have one form.

    split: llama.cpp's name of how text is split; extra: further tensors in float32; metadata: adds further
        fields
    """
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_eos_token_id(config["eos_token_id"])
    metadata(writer)
    kind = gguf.GGMLQuantizationType[form]
    for name, tensor in load_file(model / "model.safetensors").items():
        weight = tensor.float().numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                weight = permuted(weight, config[heads])
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(numbers: Array, bits: int) -> Array:
    """Rows of whole numbers as int32 words, the first number in the lowest bits."""
    per_word = 32 // bits
    words = numbers.astype(np.uint64).reshape(len(numbers), -1, per_word)
    factors = np.array([2 ** (bits * place) for place in range(per_word)], np.uint64)
    return (words * factors).sum(-1).astype(np.uint32).view(np.int32)


def drawn(shape: tuple[int, int], group: int, least: int, largest: int, seed: int) -> tuple[Array, Array]:
    """Codes [N, K] that take every value, and scales [N, K / group] in float16."""
    random = np.random.default_rng(seed)
    codes = random.integers(least, largest + 1, shape)
    scales = random.uniform(0.2, 1.0, (shape[0], shape[1] // group)) * 0.5 / largest
    return codes, scales.astype(np.float16)


def spread(values: Array, width: int) -> Array:
    return np.repeat(values, width // values.shape[1], axis=1)


def as_tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


Parts = tuple[dict[str, Tensor], NDArray[np.float32]]


def gptq(shape: tuple[int, int], seed: int, *, bits: int = 4, group: int = 32, symmetric: bool = True,
         act_order: bool = False, version: int = 1) -> Parts:  # fmt: skip
    """A layer of GPTQ, and its weight [N, K]."""
    half = 2 ** (bits - 1)
    numbers, scales = drawn(shape, group, 0, 2 * half - 1, seed)
    random = np.random.default_rng(seed + 1)
    zeros = np.full(scales.shape, half) if symmetric else random.integers(1, 2 * half, scales.shape)
    groups = np.arange(shape[1]) // group
    if act_order:
        random.shuffle(groups)
    weight = scales.astype(np.float32)[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)
    parts = {
        "qweight": as_tensor(packed(numbers, bits).T),
        "qzeros": as_tensor(packed((zeros - (version == 1)).T, bits)),
        "scales": as_tensor(scales.T),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return parts, weight


def awq(shape: tuple[int, int], seed: int) -> Parts:
    """A layer of AWQ with zero points, in the form ``gemm``, and its weight [N, K]."""
    numbers, scales = drawn(shape, 32, 0, 15, seed)
    zeros = np.random.default_rng(seed + 1).integers(0, 16, scales.shape)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(values: Array) -> Array:
        """[N, X] -> words [X, N / 8]."""
        columns = values.T.reshape(values.shape[1], -1, 8)[:, :, order]
        return packed(columns.reshape(values.shape[1], -1), 4)

    weight = scales.astype(np.float32).repeat(32, 1) * (numbers - zeros.repeat(32, 1)).astype(np.float32)
    parts = {
        "qweight": as_tensor(interleaved(numbers)),
        "qzeros": as_tensor(interleaved(zeros)),
        "scales": as_tensor(scales.T),
    }
    return parts, weight


def compressed(shape: tuple[int, int], seed: int, *, form: str, group: int | None = None) -> Parts:
    """A layer of compressed-tensors: ``pack``, ``zeros`` (with zero points), ``int`` or ``float``."""
    rows, width = shape
    if form == "float":
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
        scales = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        return {"weight": weight, "weight_scale": scales}, (weight.float() * scales.float()).numpy()
    if form == "int":
        codes, given = drawn(shape, width, -128, 127, seed)
        parts = {"weight": as_tensor(codes.astype(np.int8)), "weight_scale": as_tensor(given)}
        return parts, codes.astype(np.float32) * given.astype(np.float32)
    numbers, given = drawn(shape, group or 32, 0, 15, seed)
    zeros = np.full(given.shape, 8)
    parts = {
        "weight_packed": as_tensor(packed(numbers, 4)),
        "weight_scale": as_tensor(given),
        "weight_shape": torch.tensor(shape),
    }
    if form == "zeros":
        zeros = np.random.default_rng(seed + 1).integers(0, 16, given.shape)
        parts["weight_zero_point"] = as_tensor(packed(zeros.T, 4).T)
    offset = (numbers - spread(zeros, width)).astype(np.float32)
    return parts, spread(given.astype(np.float32), width) * offset


def fp8(
    shape: tuple[int, int], seed: int, *, blocks: tuple[int, int] | None, name: str = "weight_scale_inv"
) -> Parts:
    """A layer in fp8 with a scale for the matrix, or for blocks of rows and columns, which the edges may cut.

    name: of the blocks' scales
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    if blocks is None:
        scale = torch.rand((), generator=generator)
        return {"weight": weight, "weight_scale": scale}, (weight.float() * scale).numpy()
    grid = torch.rand(-(-shape[0] // blocks[0]), -(-shape[1] // blocks[1]), generator=generator)
    whole = np.kron(grid.numpy(), np.ones(blocks, np.float32))[: shape[0], : shape[1]]
    return {"weight": weight, name: grid}, weight.float().numpy() * whole


def write_quantized(
    model: Path, out: Path, settings: dict[str, Any], make: Callable[[tuple[int, int], int], Parts]
) -> dict[str, NDArray[np.float32]]:
    """A copy of a model whose linear layers but the LM head are quantised; returns their weights [N, K]."""
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors = load_file(model / "model.safetensors")
    expected = {}
    for seed, name in enumerate([name for name in tensors if "_proj" in name]):
        rows, width = tensors.pop(name).shape
        parts, expected[name] = make((rows, width), seed)
        prefix = name.removesuffix(".weight")
        tensors |= {f"{prefix}.{part}": value for part, value in parts.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return expected


def group_of(**weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with one group."""
    form = weights.pop("format")
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = group_of(format="pack-quantized", type="int", num_bits=4)

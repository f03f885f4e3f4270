"""A Hugging Face directory of a Llama as a GGUF file, which llama.cpp and OpenVINO GenAI read.

llama.cpp's own converter is a script of its repository and in no package, so this one writes what a Llama
needs: its sizes, its tokenizer, its chat template and its weights. All matrices have one form, F32, Q8_0,
Q4_0 or Q4_1, the LM head and the embedding among them; norms are F32. ``llama-quantize --pure`` chooses the
same.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import read_json
from drafters.checkpoints.quantized import TensorFiles
from runtime.core.errors import UserError

# Weights in a block that share a scale, in all forms but F32.
BLOCK_SIZE = 32
# The form whose matrices are not rounded.
FLOAT = "F32"
# Names of a layer's tensors in GGUF, and in the model of Hugging Face.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class UnsupportedModelError(UserError):
    """A model that this writer has no form for; the message says what about it."""


def write_gguf(model_dir: Path, path: Path, form: str) -> None:
    """Write the model as one GGUF file. Raises UnsupportedModelError for what is no plain Llama.

    form: ggml's name of the type of all matrices
    """
    import gguf

    config = read_json(model_dir / "config.json", "--model")
    check(config, form)
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, config)
    _add_tokenizer(writer, model_dir, config)
    dtype = gguf.GGMLQuantizationType[form]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == FLOAT else f"MOSTLY_{form}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, values in tensors(model_dir, config):
        if values.ndim > 1 and form != FLOAT:
            writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(config: Mapping[str, Any], form: str) -> None:
    """Raise UnsupportedModelError for a model that this writer cannot express."""
    if config.get("model_type") != "llama":
        raise UnsupportedModelError(
            f"only a model of type llama can be written, got {config.get('model_type')}"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedModelError("a Llama with biases cannot be written")
    kind = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":
        raise UnsupportedModelError(f"rotary embeddings must be of type default, got {kind}")
    attention = head_dim(config) * config["num_attention_heads"]
    widths = (config["hidden_size"], config["intermediate_size"], attention)
    if form != FLOAT and any(width % BLOCK_SIZE for width in widths):
        raise UnsupportedModelError(f"rows of {form} must be multiples of {BLOCK_SIZE}, got {widths}")


def head_dim(config: Mapping[str, Any]) -> int:
    """The width of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary embedding, which newer configurations have in a table of their own."""
    return float((config.get("rope_parameters") or config).get("rope_theta", 10000.0))


def num_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def tensors(model_dir: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """GGUF's names and the weights in float32, each read when it is asked for."""
    files = TensorFiles(model_dir)

    def weight(name: str) -> NDArray[np.float32]:
        if name not in files.names():
            raise UserError(f"--model: the safetensors files of {model_dir} have no tensor {name}")
        # By way of torch, because numpy has no bfloat16.
        found: NDArray[np.float32] = files.read(name).float().numpy()
        return found

    yield "token_embd.weight", weight("model.embed_tokens.weight")
    yield "output_norm.weight", weight("model.norm.weight")
    if not config.get("tie_word_embeddings"):
        yield "output.weight", weight("lm_head.weight")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": num_kv_heads(config)}
    for layer in range(config["num_hidden_layers"]):
        for name, of_model in LAYER_NAMES.items():
            values = weight(f"model.layers.{layer}.{of_model}.weight")
            if name in heads:
                values = interleave(values, heads[name])
            yield f"blk.{layer}.{name}.weight", values


def interleave(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of every head: llama.cpp rotates neighbours, Hugging Face the two halves of a head."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_name("model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(num_kv_heads(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, model_dir: Path, config: Mapping[str, Any]) -> None:
    """Add tokens, merges, special tokens and the chat template."""
    from gguf import SpecialVocab, TokenType

    described = read_json(model_dir / "tokenizer.json", "--model")
    model = described["model"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(f"the tokenizer must be of type BPE, got {model['type']}")
    special = SpecialVocab(model_dir, load_merges=True, n_vocab=config["vocab_size"])
    if not special.merges:
        raise UnsupportedModelError("the tokenizer has no merges, which llama.cpp wants to have")
    # The model may have more rows than the tokenizer has tokens.
    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    types = [TokenType.UNUSED] * len(tokens)
    from_bytes = bool(model.get("byte_fallback"))
    for token, index in model["vocab"].items():
        tokens[index] = token
        types[index] = TokenType.BYTE if from_bytes and token in BYTES else TokenType.NORMAL
    for added in described.get("added_tokens", []):
        if added["id"] < len(tokens):
            tokens[added["id"]] = added["content"]
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("llama" if from_bytes else "gpt2")
    if from_bytes:
        # SentencePiece prefers a higher score, BPE an earlier merge: tokens are numbered in that order.
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    else:
        writer.add_tokenizer_pre("smollm" if _splits_digits(described) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # The comparison gives token ids, to which nothing may be added.
    special.add_special_token = {"bos": False}
    special.add_to_gguf(writer, quiet=True)


def _splits_digits(described: Mapping[str, Any]) -> bool:
    """Whether the tokenizer takes digits one by one, as SmolLM's does."""
    return '"individual_digits": true' in json.dumps(described.get("pre_tokenizer"))

"""The files of a model: every form is read exactly, and what cannot be read is refused by its field."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from drafters.checkpoints.gguf_file import read_header
from drafters.checkpoints.loading import load_config, load_model, load_tokenizer, stored_tensors
from drafters.checkpoints.stored import Codes
from drafters.model_files import check_model_files, stored_weights_digest
from drafters.target_models import TargetModelError, weights_digest
from tests.checkpoint_files import (
    AWQ,
    GPTQ,
    PACKED,
    Parts,
    awq,
    compressed,
    fp8,
    gguf_name,
    gptq,
    group_of,
    permuted,
    write_gguf,
    write_quantized,
)

FORMS: dict[str, tuple[dict[str, Any], Callable[..., Parts], bool]] = {
    # The settings, the layers, and whether their weights are codes times scales.
    "gptq": (GPTQ, gptq, True),
    "gptq-8-bits": (GPTQ | {"bits": 8}, functools.partial(gptq, bits=8, group=64, symmetric=False), True),
    "gptq-asymmetric": (GPTQ | {"sym": False}, functools.partial(gptq, symmetric=False), True),
    "gptq-v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        functools.partial(gptq, symmetric=False, version=2),
        True,
    ),
    "gptq-act-order": (GPTQ | {"desc_act": True}, functools.partial(gptq, act_order=True), False),
    "awq": (AWQ, awq, True),
    "packed": (PACKED, functools.partial(compressed, form="pack"), True),
    "packed-zeros": (PACKED, functools.partial(compressed, form="zeros"), True),
    "int8": (
        group_of(format="int-quantized", type="int", num_bits=8),
        functools.partial(compressed, form="int"),
        True,
    ),
    "float8": (
        group_of(format="float-quantized", type="float", num_bits=8),
        functools.partial(compressed, form="float"),
        True,
    ),
    "float8-blocks": (
        group_of(
            format="float-quantized", type="float", num_bits=8, strategy="block", block_structure=[48, 40]
        ),
        functools.partial(fp8, blocks=(48, 40), name="weight_scale"),
        True,
    ),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3"}, functools.partial(fp8, blocks=None), True),
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]},
        functools.partial(fp8, blocks=(48, 40)),
        True,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_quantised_checkpoint_is_read_exactly(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    settings, make, has_codes = FORMS[name]
    expected = write_quantized(tiny_model_dir, tmp_path / "model", settings, make)
    check_model_files(tmp_path / "model")
    config = load_config(tmp_path / "model")
    assert getattr(config, "quantization_config", None) is None
    model = load_model(tmp_path / "model", config, dtype=torch.float32)
    found = model.state_dict()
    for key, weight in expected.items():
        np.testing.assert_array_equal(found[key].numpy(), weight, err_msg=key)
    float_model = load_model(tiny_model_dir, dtype=torch.float32).state_dict()
    for key in found.keys() - expected.keys():
        assert torch.equal(found[key], float_model[key]), key
    stored = stored_tensors(tmp_path / "model")
    assert len(stored) == len(expected)
    assert {isinstance(tensor.read(), Codes) for tensor in stored} == {has_codes}


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_file_is_read_exactly(form: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Weights, tokenizer, configuration and the digest by which a head knows its model."""
    path = tmp_path / ("tiny.gguf" if form != "F16" else "TINY.GGUF")
    write_gguf(tiny_model_dir, path, form)
    check_model_files(path)
    config = load_config(path)
    model = load_model(path, config, dtype=torch.float32)
    reference = load_model(tiny_model_dir, dtype=torch.float32)
    kind = gguf.GGMLQuantizationType[form]
    found = model.state_dict()
    for name, weight in reference.state_dict().items():
        expected = weight.numpy()
        if expected.ndim > 1:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(found[name].numpy(), expected.reshape(weight.shape), err_msg=name)
    tokenizer, given = load_tokenizer(path), load_tokenizer(tiny_model_dir)
    assert tokenizer("What is 12 + 30?").input_ids == given("What is 12 + 30?").input_ids
    assert stored_weights_digest(path) == weights_digest(model)
    model.save_pretrained(tmp_path / "directory")
    assert stored_weights_digest(tmp_path / "directory") == weights_digest(model)
    num_stored = 0 if form in ("F32", "F16", "BF16") else 16
    stored = [tensor.read() for tensor in stored_tensors(path)]
    assert len(stored) == num_stored
    assert all(isinstance(tensor, Codes) == (form in ("Q8_0", "Q4_0")) for tensor in stored)


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantised_as_the_package_does(form: str, tmp_path: Path) -> None:
    """Of random blocks, which use every code."""
    kind = gguf.GGMLQuantizationType[form]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (5, 512 // length, size), np.uint8)
    scale_places = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2)}[form]
    for place in scale_places:
        halves = np.random.default_rng(place).normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    rows = blocks.reshape(5, -1)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first.weight", np.zeros(7, np.float32))
    writer.add_tensor("x.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(rows, kind)
    (stored,) = stored_tensors(tmp_path / "x.gguf")
    assert stored.kind == form
    np.testing.assert_array_equal(stored.dequantized().numpy(), expected)


def llama3_factors(count: int) -> NDArray[np.float32]:
    """As llama.cpp writes them for Llama 3.2, written out."""
    factors = []
    for place in range(count):
        wavelength = 2 * math.pi * 10000.0 ** (place / count)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    return np.array(factors, np.float32)


def test_rotary_scaling_of_llama_3(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Transformers leaves it out, and the model would be another one."""
    factors = llama3_factors(8)
    assert len(set(factors.tolist())) > 1
    write_gguf(tiny_model_dir, tmp_path / "x.gguf", "Q8_0", extra={"rope_freqs.weight": factors})
    config = load_config(tmp_path / "x.gguf")
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("llama3", 32.0)
    model = load_model(tmp_path / "x.gguf", config, dtype=torch.float32)
    usual = 10000.0 ** -(np.arange(8) / 8)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), usual / factors, rtol=1e-5)


def write_settings(path: Path, architecture: str, settings: dict[str, Any]) -> None:
    """A GGUF file of an architecture with these settings and hardly any weights."""
    usual = {"context_length": 4096, "feed_forward_length": 256, "attention.layer_norm_rms_epsilon": 1e-6}
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (usual | settings).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


HEADS = {"attention.head_count": 32, "attention.head_count_kv": 16}
GEMMA = HEADS | {"embedding_length": 4608, "attention.key_length": 128, "attention.value_length": 128}


def test_settings_that_transformers_does_not_read(tmp_path: Path) -> None:
    """Caps of Gemma 2 and the scale of its largest model, the window and the rotated part of Phi-3."""
    path = tmp_path / "x.gguf"
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    for layers, scale in ((42, 256), (46, 144)):
        write_settings(path, "gemma2", GEMMA | caps | {"block_count": layers, "attention.sliding_window": 64})
        config = load_config(path)
        assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 10.0)
        assert (config.query_pre_attn_scalar, config.sliding_window) == (scale, 64)
    phi = HEADS | {"block_count": 2, "embedding_length": 3072}
    write_settings(path, "phi3", phi | {"attention.sliding_window": 2047, "rope.dimension_count": 48})
    config = load_config(path)
    assert (config.sliding_window, config.rope_parameters["partial_rotary_factor"]) == (2047, 0.5)
    write_settings(path, "qwen3", phi | {"attention.key_length": 128, "rope.dimension_count": 48})
    assert "qwen3.rope.dimension_count: expected all 128 dimensions of a head, got 48" in gguf_refusal(
        tmp_path
    )
    write_settings(path, "qwen3", phi | {"final_logit_softcapping": 30.0})
    assert "qwen3.final_logit_softcapping: expected none for a model of this" in gguf_refusal(tmp_path)


def test_a_rotary_factor_of_the_type_none(tiny_model_dir: Path, tmp_path: Path) -> None:
    def with_type(kind: gguf.RopeScalingType) -> Any:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)

        write_gguf(tiny_model_dir, tmp_path / "x.gguf", "Q8_0", metadata=add)
        return load_config(tmp_path / "x.gguf").rope_parameters

    assert with_type(gguf.RopeScalingType.NONE)["rope_type"] == "default"
    linear = with_type(gguf.RopeScalingType.LINEAR)
    assert (linear["rope_type"], linear["factor"]) == ("linear", 4.0)


def test_a_turn_ends_a_text(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(tiny_model_dir, path, "Q8_0", metadata=lambda writer: writer.add_eot_token_id(5))
    assert load_model(path, dtype=torch.float32).generation_config.eos_token_id == [0, 5]


@pytest.mark.parametrize(
    ("split", "is_known"),
    [("gpt-2", True), ("smollm", True), ("qwen2", True), ("llama-bpe", True), ("deepseek-llm", False)],
)
def test_a_way_to_split_text_that_transformers_does_not_know(
    split: str, is_known: bool, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(tiny_model_dir, path, "Q8_0", split=split)
    assert load_tokenizer(path).encode("12 x")
    warnings = [record.getMessage() for record in caplog.records if "tokenizer.ggml.pre" in record.message]
    assert is_known == (not warnings)
    assert is_known or f"does not know '{split}' and splits text as GPT-2 does" in warnings[0]


def gguf_refusal(tmp_path: Path) -> str:
    with pytest.raises(TargetModelError) as caught:
        load_model(tmp_path / "x.gguf", load_config(tmp_path / "x.gguf"), dtype=torch.float32)
    return str(caught.value)


def test_what_transformers_would_drop_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Factors that are not Llama 3's, another rotary scaling, and biases."""
    path = tmp_path / "x.gguf"
    write_gguf(tiny_model_dir, path, "Q8_0", extra={"rope_freqs.weight": np.arange(1, 9).astype(np.float32)})
    assert "rope_freqs.weight: expected the factors of Llama 3's rotary scaling" in gguf_refusal(tmp_path)
    yarn = gguf.RopeScalingType.YARN
    write_gguf(tiny_model_dir, path, "Q8_0", metadata=lambda writer: writer.add_rope_scaling_type(yarn))
    assert "llama.rope.scaling.type: must be none or linear, got 'yarn'" in gguf_refusal(tmp_path)
    write_gguf(tiny_model_dir, path, "Q8_0", extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    assert "and the model that Transformers makes of it" in gguf_refusal(tmp_path)


def test_a_damaged_gguf_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(tiny_model_dir, path, "Q8_0")
    whole = path.read_bytes()
    for content, message in (
        (b"<html>", "is no GGUF file"),
        (whole[:200], "is cut short or damaged"),
        (whole[:-40], f"has {len(whole) - 40} bytes and must have "),
        (whole[:4] + b"\x01" + whole[5:], "version: must be 2 or 3, got 1"),
    ):
        path.write_bytes(content)
        with pytest.raises(TargetModelError, match=message):
            check_model_files(path)
    key = b"general.alignment" + (4).to_bytes(4, "little")
    number = whole.index(b"general.")
    count = int.from_bytes(whole[16:24], "little")
    entry = (len("general.alignment")).to_bytes(8, "little") + key + (0).to_bytes(4, "little")
    path.write_bytes(whole[:16] + (count + 1).to_bytes(8, "little") + entry + whole[number - 8 :])
    with pytest.raises(TargetModelError, match=r"general\.alignment: must be a whole number above 0, got 0"):
        check_model_files(path)
    write_gguf(tiny_model_dir, path, "F16", metadata=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(TargetModelError, match=r"is one part of 3; join them with llama-gguf-split --merge$"):
        check_model_files(path)
    write_gguf(tiny_model_dir, path, "Q5_0")
    with pytest.raises(TargetModelError, match=r"must have one of the forms F32, .*, got Q5_0"):
        read_header(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: must be one of gptq, awq, .*got 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, "quantization_config.bits: must be one of 2, 4, 8, got 3"),
        (GPTQ | {"dynamic": {"+:q_proj": {"bits": 8}}}, "quantization_config.dynamic: must be one of None"),
        (AWQ | {"version": "gemv"}, "quantization_config.version: must be one of gemm, got 'gemv'"),
        (group_of(format="marlin-24", type="int", num_bits=4), "format: must be one of pack-quantized"),
        (group_of(format="pack-quantized", type="int", num_bits=3), "weights.num_bits: must be one of 2, 4"),
        (
            PACKED | {"transform_config": {"config_groups": {"R1": {}}}},
            "quantization_config.transform_config: expected none",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt: must be one of e4m3, got 'e5m2'"),
        (GPTQ, "quant_method: .* has no tensor of gptq in its files"),
        (
            PACKED | {"config_groups": {"a": {"weights": "x"}}},
            "config_groups.a.weights: expected an object, got 'x'",
        ),
        (
            group_of(format="float-quantized", type="float", num_bits=8, block_structure=[128]),
            "weights.block_structure: expected numbers of rows and columns, got",
        ),
        (PACKED | {"config_groups": [{}]}, "config_groups: expected an object of objects, got"),
    ],
)
def test_what_is_refused(settings: Any, message: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    def unchanged(shape: tuple[int, int], seed: int) -> Parts:
        return {"weight": torch.zeros(shape)}, np.zeros(shape, np.float32)

    write_quantized(tiny_model_dir, tmp_path / "model", settings, unchanged)
    with pytest.raises(TargetModelError, match=message):
        load_model(tmp_path / "model", load_config(tmp_path / "model"), dtype=torch.float32)


def test_weights_of_another_library_beside_those_of_a_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Mistral's repositories have a file with all weights under other names."""
    model = tmp_path / "model"
    write_quantized(tiny_model_dir, model, GPTQ, gptq)
    digest = stored_weights_digest(model)
    weights = load_file(model / "model.safetensors")
    save_file({"norm.weight": torch.ones(3)}, model / "consolidated.safetensors")
    load_model(model, dtype=torch.float32)
    assert stored_weights_digest(model) == digest != ""
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "part.safetensors")}))
    with pytest.raises(TargetModelError, match=r"part\.safetensors cannot be read: No such file"):
        check_model_files(model)
    assert stored_weights_digest(model) == ""
    save_file(weights, model / "part.safetensors")
    (model / "consolidated.safetensors").write_bytes(b"cut short")
    check_model_files(model)
    load_model(model, dtype=torch.float32)
    assert stored_weights_digest(model) == digest
    index.write_text("{}")
    with pytest.raises(
        TargetModelError, match=r"index\.json: expected an object with the field 'weight_map'"
    ):
        check_model_files(model)
    assert stored_weights_digest(model) == ""


def test_missing_and_left_over_tensors(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A bias of zeros, which files of GPTQ have, is none; one of other numbers is."""

    def with_bias(value: float) -> Callable[[tuple[int, int], int], Parts]:
        def make(shape: tuple[int, int], seed: int) -> Parts:
            parts, weight = gptq(shape, seed)
            return parts | {"bias": torch.full(shape[:1], value)}, weight

        return make

    write_quantized(tiny_model_dir, tmp_path / "zeros", GPTQ, with_bias(0.0))
    load_model(tmp_path / "zeros", dtype=torch.float32)
    write_quantized(tiny_model_dir, tmp_path / "ones", GPTQ, with_bias(1.0))
    with pytest.raises(TargetModelError, match=r"_proj\.bias: the model has no such weight \(14 of"):
        load_model(tmp_path / "ones", dtype=torch.float32)

    def without_scales(shape: tuple[int, int], seed: int) -> Parts:
        parts, weight = gptq(shape, seed)
        return {name: value for name, value in parts.items() if name != "scales"}, weight

    write_quantized(tiny_model_dir, tmp_path / "cut", GPTQ, without_scales)
    with pytest.raises(TargetModelError, match=r"\.scales: expected this tensor beside the layer's others"):
        load_model(tmp_path / "cut", dtype=torch.float32)


def test_the_names_and_the_order_of_rows() -> None:
    """Of the tests' own writer."""
    assert gguf_name("model.layers.1.mlp.up_proj.weight") == "blk.1.ffn_up.weight"
    rows = np.arange(8)[:, None]
    assert permuted(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert json.dumps(GPTQ)

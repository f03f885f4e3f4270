"""Quantised checkpoints of Hugging Face: GPTQ, AWQ, compressed-tensors and fp8, read without their libraries.

Each format stores a linear layer's weight as several tensors. What they hold is read as codes and scales
where a weight is a code times a scale, and as float32 where it is not. Those libraries compute on a GPU, and
give floats alone; the codes are what a bundle keeps.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.checkpoints.stored import Codes, StoredTensor, TensorFiles
from drafters.target_models import TargetModelError

FIELD = "quantization_config"
# The name that compressed-tensors had for it.
OLD_FIELD = "compression_config"
# Bits of which whole numbers fill a word of 32.
PACKED_BITS = (2, 4, 8)
# Column of a group of eight that each place of an AWQ word holds, from the lowest bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Tensors of activations and caches, which stay in float here.
UNUSED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
)


@dataclass(frozen=True)
class Layer:
    """A linear layer's tensors: ``layer("scales")`` reads PREFIX.scales. Raises TargetModelError."""

    files: TensorFiles
    prefix: str

    def __call__(self, part: str) -> Tensor:
        if not self.has(part):
            raise TargetModelError(f"{self.prefix}.{part}: expected this tensor beside the layer's others")
        return self.files.read(f"{self.prefix}.{part}")

    def has(self, part: str) -> bool:
        return f"{self.prefix}.{part}" in self.files.names()


@dataclass(frozen=True)
class Format:
    """A format of quantised layers.

    marks: a layer with one of these tensors is quantised
    parts: the other tensors that such a layer may have
    check: raises TargetModelError for settings that cannot be read; its argument is ``quantization_config``
    kind: the name of a layer's form, from the settings
    read: a layer's weight [N, K]
    """

    marks: tuple[str, ...]
    parts: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], None]
    kind: Callable[[Mapping[str, Any]], str]
    read: Callable[[Layer, Mapping[str, Any]], Codes | Tensor]


def read_settings(directory: Path) -> Mapping[str, Any] | None:
    """The settings of quantisation in a directory's ``config.json``; None for float weights.

    Raises TargetModelError for what is no object.
    """
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    found = values.get(FIELD) or values.get(OLD_FIELD) or None
    if found is not None and not isinstance(found, dict):
        raise TargetModelError(f"{FIELD}: expected an object, got {found!r:.60}")
    return found


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises TargetModelError, which names the field, for settings that cannot be read."""
    _expect(settings, "quant_method", *FORMATS)
    FORMATS[settings["quant_method"]].check(settings)


def stored_tensors(
    files: TensorFiles, settings: Mapping[str, Any]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """The quantised weights by the names that they have in a model, and the names of all their parts."""
    form = FORMATS[settings["quant_method"]]
    names = files.names()
    found: dict[str, StoredTensor] = {}
    parts = {name for name in names if name.endswith(UNUSED)}
    for mark in form.marks:
        for name in sorted(name for name in names if name.endswith(f".{mark}")):
            layer = Layer(files, name.removesuffix(f".{mark}"))
            weight = f"{layer.prefix}.weight"
            if weight in found:
                continue
            found[weight] = StoredTensor(form.kind(settings), functools.partial(form.read, layer, settings))
            parts |= {f"{layer.prefix}.{part}" for part in (*form.marks, *form.parts)} & names
    return found, parts


def _expect(settings: Mapping[str, Any], field: str, *allowed: Any, where: str = FIELD) -> None:
    if settings.get(field) not in allowed:
        listed = ", ".join(map(str, allowed))
        raise TargetModelError(f"{where}.{field}: must be one of {listed}, got {settings.get(field)!r}")


def _unpack(words: Tensor, bits: int) -> Tensor:
    """The numbers in the last axis of ``words`` [..., W] int32, the lowest bits first: [..., W * 32 / bits].

    bits: a divisor of 32, at most 8. The numbers are int16 from 0 to 2 ** bits - 1.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(-2).to(torch.int16)


def _check_gptq(settings: Mapping[str, Any]) -> None:
    _expect(settings, "bits", *PACKED_BITS)
    _expect(settings, "checkpoint_format", None, "gptq", "gptq_v2")
    _expect({"dynamic": settings.get("dynamic") or None}, "dynamic", None)


def _gptq(layer: Layer, settings: Mapping[str, Any]) -> Codes | Tensor:
    """qweight [K / numbers, N] is packed along K, qzeros [G, N / numbers] along N; scales are [G, N]."""
    bits = settings["bits"]
    codes = _unpack(layer("qweight").T.contiguous(), bits)
    scales = layer("scales").float().T
    zeros = _unpack(layer("qzeros"), bits).T[: scales.shape[0]]
    if settings.get("checkpoint_format") != "gptq_v2":
        # The first form of GPTQ files stores a zero point less one; its sum wraps as its kernels do.
        zeros = (zeros + 1) & (2**bits - 1)
    width, num_groups = codes.shape[1], scales.shape[1]
    plain = torch.arange(width) // (width // num_groups)
    groups = layer("g_idx").long() if layer.has("g_idx") else plain
    codes = codes - zeros[:, groups]
    if torch.equal(groups, plain):
        return Codes(_narrow(codes), scales.contiguous())
    # With act-order a group's rows lie anywhere, and blocks of consecutive rows have several scales.
    return codes.float() * scales[:, groups]


def _check_awq(settings: Mapping[str, Any]) -> None:
    _expect({"bits": settings.get("bits", settings.get("w_bit"))}, "bits", 4)
    version = settings.get("version", "gemm")
    _expect({"version": str(version).lower()}, "version", "gemm")


def _awq(layer: Layer, settings: Mapping[str, Any]) -> Codes:
    """qweight [K, N / 8] and qzeros [G, N / 8] are packed along N in AWQ_ORDER; scales are [G, N]."""
    places = torch.tensor([AWQ_ORDER.index(column) for column in range(8)])

    def columns(part: str) -> Tensor:
        numbers = _unpack(layer(part), 4)
        return numbers.reshape(numbers.shape[0], -1, 8)[..., places].reshape(numbers.shape).T

    codes, zeros = columns("qweight"), columns("qzeros")
    scales = layer("scales").float().T.contiguous()
    return Codes(_narrow(codes - _repeated(zeros, codes.shape[1])), scales)


COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _check_compressed(settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise TargetModelError(f"{FIELD}.config_groups: expected an object of objects, got {groups!r:.60}")
    if not groups:
        raise TargetModelError(f"{FIELD}.config_groups: expected at least one group of layers, got none")
    for name, group in groups.items():
        where = f"{FIELD}.config_groups.{name}"
        form = group.get("format") or settings.get("format")
        _expect({"format": form}, "format", *COMPRESSED_FORMATS, where=where)
        weights = group.get("weights") or {}
        if not isinstance(weights, dict):
            raise TargetModelError(f"{where}.weights: expected an object, got {weights!r:.60}")
        _expect({"type": weights.get("type", "int")}, "type", "int", "float", where=f"{where}.weights")
        bits = PACKED_BITS if weights.get("type", "int") == "int" else (8,)
        _expect(weights, "num_bits", *bits, where=f"{where}.weights")
        block = weights.get("block_structure")
        is_block = (
            isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        )
        if block is not None and not is_block:
            raise TargetModelError(
                f"{where}.weights.block_structure: expected numbers of rows and columns, got {block!r:.60}"
            )
    if len({str(group["weights"].get("block_structure")) for group in groups.values()} - {"None"}) > 1:
        raise TargetModelError(f"{FIELD}.config_groups: expected blocks of one size, got several")
    bits_of = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    formats = {group.get("format") or settings.get("format") for group in groups.values()}
    if len(bits_of) > 1 and "pack-quantized" in formats:
        raise TargetModelError(
            f"{FIELD}.config_groups: expected groups of one size, got several numbers of bits"
        )
    for field in ("sparsity_config", "transform_config"):
        value = settings.get(field) or {}
        if value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise TargetModelError(f"{FIELD}.{field}: expected none, got {value}")


def _group_weights(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How the weights of every group of layers are quantised."""
    return [group["weights"] for group in settings["config_groups"].values()]


def _compressed_kind(settings: Mapping[str, Any]) -> str:
    first = _group_weights(settings)[0]
    number = "fp" if first.get("type") == "float" else "int"
    return f"compressed-tensors {number}{first['num_bits']}"


def _compressed(layer: Layer, settings: Mapping[str, Any]) -> Codes | Tensor:
    """weight_packed [N, words] along K with codes moved to be positive, or weight [N, K] in int8 or fp8."""
    scales = layer("weight_scale").float()
    packed = layer.has("weight_packed")
    if packed:
        bits: int = _group_weights(settings)[0]["num_bits"]
        rows, width = layer("weight_shape").tolist()
        # Half the range is added to codes and zero points alike.
        half = 2 ** (bits - 1)
        codes = _unpack(layer("weight_packed"), bits)[:rows, :width] - half
    else:
        codes = layer("weight")
        rows, width = codes.shape
    # Rows and columns of the blocks that share a scale; None if no group has blocks.
    block = next(filter(None, (group.get("block_structure") for group in _group_weights(settings))), None)
    scales = _by_row(scales, rows, width, block)
    if layer.has("weight_zero_point"):
        zeros = layer("weight_zero_point")
        if packed and zeros.dtype == torch.int32:
            zeros = _unpack(zeros.T.contiguous(), bits).T[:rows] - half
        if codes.is_floating_point():
            if zeros.float().any():
                raise TargetModelError(f"{layer.prefix}.weight_zero_point: expected zeros beside fp8 weights")
        else:
            zeros = _by_row(zeros.to(torch.int16), rows, width, block)
            codes = codes.to(torch.int16) - _repeated(zeros, width)
    codes = codes if codes.is_floating_point() else _narrow(codes)
    if layer.has("weight_g_idx"):
        groups = layer("weight_g_idx").long()
        plain = torch.arange(width) // (width // scales.shape[1])
        # An index of -1 says that groups lie in a row.
        if (groups >= 0).all() and not torch.equal(groups, plain):
            return codes.float() * scales[:, groups]
    return Codes(codes, scales)


# Rows and columns of a block in fp8 where the settings do not say it, as in Transformers.
FP8_BLOCK = (128, 128)


def _check_fp8(settings: Mapping[str, Any]) -> None:
    _expect({"fmt": settings.get("fmt", "e4m3")}, "fmt", "e4m3")


def _fp8(layer: Layer, settings: Mapping[str, Any]) -> Codes:
    """weight [N, K] in e4m3 with a scale for the matrix, for a row, or for a block of rows and columns.

    ``weight_scale_inv`` is, against its name, what a code is multiplied with.
    """
    codes = layer("weight")
    if codes.dtype != torch.float8_e4m3fn:
        raise TargetModelError(f"{layer.prefix}.weight: must have the type float8_e4m3fn, got {codes.dtype}")
    rows, width = codes.shape
    scales = layer("weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale").float()
    return Codes(codes, _by_row(scales, rows, width, settings.get("weight_block_size") or FP8_BLOCK))


def _by_row(values: Tensor, rows: int, width: int, block: Sequence[int] | None) -> Tensor:
    """Scales or zero points [N, G] of one for the matrix, of [N], of [N, G], or of blocks.

    block: rows and columns of a block, if the format has blocks. The matrix's edges may cut the last ones;
        where they cut columns, G is the width.
    """
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows, 1).contiguous()
    values = values.reshape(values.shape[0], -1)
    if values.shape[0] == rows and width % values.shape[1] == 0:
        return values
    if block is None or values.shape != (-(-rows // block[0]), -(-width // block[1])):
        blocks = f" in blocks of {list(block)}" if block else ""
        raise TargetModelError(
            f"scales of {list(values.shape)} do not fit a weight of [{rows}, {width}]{blocks}"
        )
    values = values.repeat_interleave(block[0], 0)[:rows]
    if width % block[1]:
        values = values.repeat_interleave(block[1], 1)[:, :width]
    return values.contiguous()


def _repeated(values: Tensor, width: int) -> Tensor:
    """[N, G] -> [N, width]."""
    return values.repeat_interleave(width // values.shape[1], 1)


def _narrow(codes: Tensor) -> Tensor:
    """Codes in int8 if they fit there."""
    fits = codes.numel() == 0 or (codes.min() >= -128 and codes.max() <= 127)
    return codes.to(torch.int8) if fits else codes


FORMATS: dict[str, Format] = {
    "gptq": Format(
        ("qweight",),
        ("qzeros", "scales", "g_idx"),
        _check_gptq,
        lambda settings: f"GPTQ int{settings['bits']}",
        _gptq,
    ),
    "awq": Format(("qweight",), ("qzeros", "scales"), _check_awq, lambda settings: "AWQ int4", _awq),
    "compressed-tensors": Format(
        ("weight_packed", "weight_scale"),
        ("weight", "weight_shape", "weight_zero_point", "weight_g_idx"),
        _check_compressed,
        _compressed_kind,
        _compressed,
    ),
    "fp8": Format(
        ("weight_scale_inv", "weight_scale"), ("weight",), _check_fp8, lambda settings: "fp8", _fp8
    ),
}

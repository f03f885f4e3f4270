"""GGUF files: which tensors they hold, in which form, and what Transformers does not read of them.

The header is read here, because the reader of the package ``gguf`` takes most of a minute for a large
vocabulary; blocks are dequantised by that package.
"""

import functools
import importlib.util
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoints.stored import Codes, StoredTensor
from drafters.target_models import TargetModelError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
ARCHITECTURE = "general.architecture"
PARTS = "split.count"
# The header's types of values: those of a fixed size, by the characters of ``struct``.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = ("F32", "F16", "BF16")
# Forms that the tests read. ``gguf`` may know more of them; a file with those is refused by name.
FORMS = (*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
ROPE_FREQS = "rope_freqs.weight"
EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
# llama.cpp writes the factors of Llama 3's rotary scaling and not the settings that they were made of. All of
# Meta's models with it, from 3.1 on, have these settings and differ in the factor alone.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Settings of files that Transformers does not read, and the fields of a configuration that have their values.
UNREAD = (
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attention.sliding_window", "sliding_window"),
)
TOKENIZER_MODEL, TOKENIZER_PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# How text is split before its bytes are merged: the names under which llama.cpp does what GPT-2 does, or does
# so after it has cut numbers into digits, which are tokens of their own in such vocabularies anyway.
GPT2_SPLITS = ("gpt-2", "olmo", "smollm", "refact", "starcoder")
# By architecture and number of layers: the models of 27 billion parameters, whose scores have another scale
# than those of the smaller ones. Files do not say it, and llama.cpp knows them by these numbers.
LARGE_GEMMA = (("gemma2", 46), ("gemma3", 62))


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: its form, its shape with the innermost axis last, and its bytes' place."""

    form: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the weights. Arrays of the metadata, such as the vocabulary, are left out."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str, rows: int | None = None) -> Any:
        """A tensor or its first rows in float32, as a numpy array. Raises KeyError."""
        import gguf

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType[tensor.form]
        return gguf.quants.dequantize(self.blocks(name, rows), kind).reshape(-1, *tensor.shape[1:])

    def blocks(self, name: str, rows: int | None = None) -> Any:
        """The bytes of a tensor or of its first rows, as a numpy array [rows, bytes of a row]."""
        import numpy as np

        tensor = self.tensors[name]
        outer = math.prod(tensor.shape[:-1])
        row_size = tensor.size // outer
        count = outer if rows is None else min(rows, outer)
        found = np.fromfile(self.path, np.uint8, count * row_size, offset=tensor.start)
        return found.reshape(count, row_size)


def is_gguf(model: Path) -> bool:
    """Whether a value of ``--model`` is a GGUF file."""
    return model.suffix.lower() == SUFFIX and model.is_file()


def read_header(path: Path) -> GgufHeader:
    """Read and check the header. Raises TargetModelError, which names the field, in one line."""
    if importlib.util.find_spec("gguf") is None:
        raise TargetModelError(f"{path} needs the package gguf; install it with pip install gguf")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise TargetModelError(f"{path} is no GGUF file; copy or download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                header = _Reader(content).header(path)
            except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
                raise TargetModelError(f"{path} is cut short or damaged; copy it again") from error
            found = len(content)
    last = max((tensor.start + tensor.size for tensor in header.tensors.values()), default=0)
    if found < last:
        raise TargetModelError(f"{path} has {found} bytes and must have {last}; copy it again")
    parts = header.metadata.get(PARTS, 1)
    if isinstance(parts, int) and parts > 1:
        raise TargetModelError(f"{path} is one part of {parts}; join them with llama-gguf-split --merge")
    if not isinstance(header.metadata.get(ARCHITECTURE), str):
        raise TargetModelError(f"{path}: {ARCHITECTURE}: expected the name of an architecture, got none")
    return header


class _Reader:
    """Walks through a header. Its numbers are little-endian."""

    def __init__(self, content: mmap.mmap):
        self._content = content
        self._place = len(MAGIC)

    def header(self, path: Path) -> GgufHeader:
        version = self._number("I")
        if version not in VERSIONS:
            raise TargetModelError(f"{path}: version: must be 2 or 3, got {version}")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_values):
            name, value = self._string(), self._value(self._number("I"))
            if value is not None:
                metadata[name] = value
        listed = [self._tensor(path) for _ in range(num_tensors)]
        alignment = metadata.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise TargetModelError(f"{path}: {ALIGNMENT}: must be a whole number above 0, got {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        tensors = {
            name: GgufTensor(form, shape, begin + offset, size) for name, form, shape, offset, size in listed
        }
        return GgufHeader(path, metadata, tensors)

    def _tensor(self, path: Path) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, form, shape, offset behind the header, and size in bytes."""
        import gguf

        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
        number, offset = self._number("I"), self._number("Q")
        names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        form = names.get(number, f"type {number}")
        if form not in FORMS:
            raise TargetModelError(
                f"{path}: {name}: must have one of the forms {', '.join(FORMS)}, got {form}"
            )
        length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
        return name, form, shape, offset, math.prod(shape) // length * size

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._content, self._place)
        self._place += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._place += length
        if self._place > len(self._content):
            raise struct.error("a string ends behind the file")
        return self._content[self._place - length : self._place].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise struct.error(f"unknown type {kind}")
        item, length = self._number("I"), self._number("Q")
        if item in SCALARS:
            self._place += length * struct.calcsize(SCALARS[item])
        else:
            for _ in range(length):
                self._skip(item)
        return None

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            length = self._number("Q")
            self._place += length
        else:
            self._value(kind)


def end_token_ids(header: GgufHeader) -> list[int]:
    """The tokens that end a text, a turn or a message, each once."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))


def unknown_split(header: GgufHeader, tokenizer: Any) -> str | None:
    """How the file says that text is split, where ``tokenizer``, made of it by Transformers, does otherwise.

    Transformers knows some names, and splits text as GPT-2 does for all others.
    """
    if header.metadata.get(TOKENIZER_MODEL) != "gpt2":
        return None
    split = str(header.metadata.get(TOKENIZER_PRE, "default"))
    as_gpt2 = type(tokenizer.backend_tokenizer.pre_tokenizer).__name__ == "ByteLevel"
    return split if as_gpt2 and split not in GPT2_SPLITS else None


def other_settings(header: GgufHeader, config: Any) -> dict[str, Any]:
    """Settings of the configuration, beside the rotary embedding's, that Transformers does not read.

    config: the configuration that Transformers made of the file
    Raises TargetModelError for one that the model does not have.
    """
    architecture = header.metadata[ARCHITECTURE]
    found: dict[str, Any] = {}
    for name, field in UNREAD:
        value = header.metadata.get(f"{architecture}.{name}")
        # Transformers reads Gemma's window; Llama and Qwen have none in llama.cpp.
        if value is None or (field == "sliding_window" and architecture != "phi3"):
            continue
        if not hasattr(config, field):
            problem = f"expected none for a model of this architecture, got {value}"
            raise TargetModelError(f"{header.path}: {architecture}.{name}: {problem}")
        # A cap of 0 is none.
        found[field] = value or None
    if (architecture, config.num_hidden_layers) in LARGE_GEMMA:
        found["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads
    return found


def rotary_settings(header: GgufHeader, config: Any) -> dict[str, Any] | None:
    """The rotary embedding's settings that Transformers leaves out; None if there are none.

    config: the configuration that Transformers made of the file
    Raises TargetModelError for settings that are not known here, because without them the model would be
    another one.
    """
    import numpy as np

    theta = config.rope_parameters.get("rope_theta")
    metadata = header.metadata
    prefix = f"{metadata[ARCHITECTURE]}.rope.scaling"
    # llama.cpp takes a factor without a type for a linear one, and ignores one of the type none.
    scaling = metadata.get(f"{prefix}.type", "linear")
    factor = metadata.get(
        f"{prefix}.factor", metadata.get(f"{metadata[ARCHITECTURE]}.rope.scale_linear", 1.0)
    )
    if scaling == "none":
        factor = 1.0
    if scaling not in ("none", "linear"):
        raise TargetModelError(f"{header.path}: {prefix}.type: must be none or linear, got {scaling!r}")
    unknown = [name for name in header.tensors if name.startswith("rope_") and name != ROPE_FREQS]
    if unknown:
        raise TargetModelError(f"{header.path}: {unknown[0]}: expected no factors of this kind")
    if ROPE_FREQS in header.tensors:
        factors = header.read(ROPE_FREQS)
        found = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), **LLAMA3_ROPE}
        if not np.allclose(factors, _llama3_factors(found, 2 * factors.size), rtol=1e-4):
            raise TargetModelError(
                f"{header.path}: {ROPE_FREQS}: expected the factors of Llama 3's rotary scaling, got others"
            )
        return found
    if factor != 1.0:
        if theta is None:
            raise TargetModelError(
                f"{header.path}: {prefix}.factor: expected 1 where layers differ, got {factor}"
            )
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_rotated = metadata.get(f"{metadata[ARCHITECTURE]}.rope.dimension_count", head_dim)
    if num_rotated == head_dim:
        return None
    if "partial_rotary_factor" not in config.rope_parameters:
        problem = f"expected all {head_dim} dimensions of a head, got {num_rotated}"
        raise TargetModelError(f"{header.path}: {metadata[ARCHITECTURE]}.rope.dimension_count: {problem}")
    return {**config.rope_parameters, "partial_rotary_factor": num_rotated / head_dim}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Any:
    """By what Llama 3's rotary embedding makes the usual wavelengths longer: [head_dim / 2]."""
    import numpy as np

    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / rope["factor"] + share)


def stored_tensors(header: GgufHeader) -> list[StoredTensor]:
    """The quantised matrices of a file; those of experts have all experts' rows."""
    return [
        StoredTensor(tensor.form, functools.partial(_read, header, name))
        for name, tensor in header.tensors.items()
        if tensor.form not in FLOATS
    ]


def _read(header: GgufHeader, name: str) -> Any:
    """Codes of Q8_0 and Q4_0, which have no minima; other forms in float32."""
    import numpy as np
    import torch

    tensor = header.tensors[name]
    rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if tensor.form not in ("Q8_0", "Q4_0"):
        return torch.from_numpy(header.read(name).reshape(rows, width))
    # A block is a scale in float16, then 32 codes: bytes, or 16 bytes whose low halves are the first 16.
    blocks = header.blocks(name).reshape(rows, width // 32, -1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    packed = blocks[..., 2:]
    if tensor.form == "Q8_0":
        codes = packed.view(np.int8)
    else:
        codes = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8) - 8
    return Codes(torch.from_numpy(codes.reshape(rows, width).copy()), torch.from_numpy(scales))


def digest_tensors(header: GgufHeader, rows: int) -> tuple[Any, Any] | None:
    """The last norm's weight [H] and the embedding's first ``rows`` rows [R, H], as torch tensors in float32.

    None for a file without them, and for Gemma, of which llama.cpp stores other norms than Transformers has.
    """
    import torch

    if not {EMBEDDING, NORM} <= header.tensors.keys() or "gemma" in header.metadata[ARCHITECTURE]:
        return None
    norm, table = header.read(NORM), header.read(EMBEDDING, rows)
    return torch.from_numpy(norm.copy()), torch.from_numpy(table.copy())

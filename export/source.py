"""Load a target model and its draft head, and refuse what a graph could not represent exactly."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from drafters.base import Drafter
from drafters.build import load_drafter
from drafters.checkpoints.gguf_file import is_gguf
from drafters.checkpoints.loading import load_config, load_model, load_tokenizer, stored_tensors
from drafters.checkpoints.stored import Codes, StoredTensor
from drafters.config import DrafterConfigError, default_target_layers
from drafters.model_files import check_base_name, check_base_weights, check_model_files, local_model
from drafters.streaming import StreamFrames
from drafters.target_models import TargetModelError
from export.errors import ExportError
from runtime.core.bundle import CHAT_TEMPLATE_NAME, SPECIAL_TOKENS_NAME, TOKENIZER_NAME, ModelSpec
from runtime.core.cli import directory_name

# Stands for a user's message in a rendered chat template.
SENTINEL = "\u2603prompt\u2603"


@dataclass
class Source:
    """A target model in memory, its tokenizer and, if there is one, its draft head.

    stored: the quantised tensors of the model's files; none for float weights
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter | None
    spec: ModelSpec
    layer_ids: tuple[int, ...]
    stored: Sequence[StoredTensor] = ()

    @cached_property
    def has_codes(self) -> bool:
        """Whether the files have quantised tensors, all of them as codes and scales that a graph may keep."""
        return bool(self.stored) and all(isinstance(tensor.read(), Codes) for tensor in self.stored)


def load_source(
    model_dir: Path,
    drafter_dir: Path | None,
    *,
    max_context: int | None = None,
    any_base: bool = False,
) -> Source:
    """Load a target model in float32 with its draft head.

    model_dir: a directory with float or quantised weights, OWNER/NAME of one on the hub, or a GGUF file
    max_context: serve at most this many positions
    any_base: take a head that was trained for another model of the same sizes
    Raises ExportError that names the setting which is not supported and what is.
    """
    name = model_dir.stem if is_gguf(model_dir) else directory_name(model_dir)
    with refusing("--model", TargetModelError):
        check_model_files(model_dir)
        model_dir = local_model(model_dir)
    where = model_dir if is_gguf(model_dir) else model_dir / "config.json"
    with refusing(f"--model: {where}"), refusing("--model", TargetModelError):
        config = load_config(model_dir)
    if config.max_position_embeddings < 1:
        given = config.max_position_embeddings
        raise ExportError(f"--model: {where}: max_position_embeddings: must be above 0, got {given}")
    context = config.max_position_embeddings if max_context is None else max_context
    if not 1 <= context <= config.max_position_embeddings:
        raise ExportError(
            f"--max-context: must be between 1 and {config.max_position_embeddings}, got {context}"
        )
    tokenizer = _load_tokenizer(model_dir, config.vocab_size)
    prompt_format = _prompt_format(tokenizer)
    drafter = _load_drafter(drafter_dir, config)
    layer_ids = (
        drafter.config.target_layer_ids if drafter else default_target_layers(config.num_hidden_layers)
    )
    with (
        refusing(f"--model: the weights in {model_dir} cannot be loaded"),
        refusing("--model", TargetModelError),
    ):
        model: Any = load_model(model_dir, config, dtype=torch.float32)
        stored = stored_tensors(model_dir)
    model.eval()
    if drafter:
        with refusing("--drafter", DrafterConfigError):
            drafter.attach_model(model)
        if not any_base:
            _check_base(drafter, model, name)
        if isinstance(drafter, StreamFrames) and drafter.config.stream_mode == "shared":
            # The fine-tuned model is the one that is served, with streams and without.
            model = drafter.merge_shared(model)
    spec = _model_spec(name, model, tokenizer, prompt_format, layer_ids, context)
    return Source(model, tokenizer, drafter, spec, layer_ids, stored)


def save_tokenizer(source: Source, directory: Path) -> None:
    """Write ``tokenizer.json``, and the chat template with its special tokens if there is one.

    Added tokens that the model has no embedding for are left out: Gemma 3's tokenizer has one, which the text
    models share with those that read images. So are the length and the padding that a fine-tuning leaves in
    the file: they are of its batches, and the runtime would cut every prompt by them.
    """
    content = json.loads(source.tokenizer.backend_tokenizer.to_str())
    content |= {"truncation": None, "padding": None}
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < source.spec.vocab_size]
    directory.joinpath(TOKENIZER_NAME).write_text(
        json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8"
    )
    if getattr(source.tokenizer, "chat_template", None):
        template = source.tokenizer.get_chat_template()
        special_tokens = json.dumps(source.tokenizer.special_tokens_map, ensure_ascii=False, indent=2)
        directory.joinpath(CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8", newline="")
        directory.joinpath(SPECIAL_TOKENS_NAME).write_text(special_tokens, encoding="utf-8")


def _load_tokenizer(model_dir: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer that can be written as ``tokenizer.json``, the only form that the runtime reads."""
    with refusing(f"--model: {model_dir} has no tokenizer that can be loaded"):
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(model_dir)
    if not len(tokenizer) or getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ExportError(f"--model: {model_dir} has no fast tokenizer; expected a tokenizer.json")
    if tokenizer.vocab_size > vocab_size:
        raise ExportError(
            f"--model: the tokenizer has {tokenizer.vocab_size} tokens, more than the model's vocab_size of "
            f"{vocab_size}"
        )
    return tokenizer


def _load_drafter(directory: Path | None, config: Any) -> Drafter | None:
    if directory is None:
        return None
    with refusing("--drafter", DrafterConfigError):
        drafter = load_drafter(directory).eval()
    for name, expected in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("base_num_layers", config.num_hidden_layers),
    ):
        if getattr(drafter.config, name) != expected:
            raise ExportError(
                f"--drafter: {name} must be the model's {expected}, got {getattr(drafter.config, name)}; "
                "this head was made for another target model"
            )
    return drafter


def _check_base(drafter: Drafter, model: Any, name: str) -> None:
    """Raises ExportError for a head of another model, by its weights or, if it has no digest, its name."""
    try:
        check_base_weights(drafter.config, model)
        check_base_name(drafter.config, name)
    except DrafterConfigError as error:
        raise ExportError(f"--drafter: {error}; --force exports it nevertheless") from error


def _model_spec(
    name: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: tuple[str, str],
    layer_ids: tuple[int, ...],
    context: int,
) -> ModelSpec:
    config = model.config
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    outside = [token for token in eos_token_ids if token >= config.vocab_size]
    if outside:
        raise ExportError(
            f"--model: eos_token_id: must be below the vocab_size of {config.vocab_size}, got {outside[0]}"
        )
    prefix, suffix = prompt_format
    heads = config.num_attention_heads
    return ModelSpec(
        name=name,
        architecture=config.architectures[0] if config.architectures else config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=context,
        feature_size=len(layer_ids) * config.hidden_size,
        eos_token_ids=eos_token_ids,
        bos_token_id=config.bos_token_id,
        prompt_prefix=prefix,
        prompt_suffix=suffix,
    )


def _prompt_format(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts before and after one user message."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    with refusing("chat_template: cannot render one user message"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": SENTINEL}], tokenize=False, add_generation_prompt=True
        )
    prefix, found, suffix = str(text).partition(SENTINEL)
    if not found:
        raise ExportError("chat_template: the rendered template does not hold the user's message unchanged")
    if SENTINEL in suffix:
        raise ExportError(
            f"chat_template: the template renders the user's message {str(text).count(SENTINEL)} times; "
            "expected it once, because a prompt is made of what stands before and after it"
        )
    return prefix, suffix


@contextmanager
def refusing(what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn an error of a library into an ExportError: ``what``, and the first line of its message.

    A line that ends with a colon says nothing without the next one.
    """
    try:
        yield
    except ExportError:
        raise
    except kind as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        problem = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise ExportError(f"{what}: {problem}") from error

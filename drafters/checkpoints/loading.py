"""Load a target model's configuration, tokenizer and weights from any file that people have.

A model is a directory of Hugging Face with float or quantised weights, or a GGUF file. In memory its weights
are floats always, so that training, the exporter's checks and PyTorch all have the same model.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.checkpoints.gguf_file import (
    TOKENIZER_PRE,
    end_token_ids,
    is_gguf,
    other_settings,
    read_header,
    rotary_settings,
    unknown_split,
)
from drafters.checkpoints.gguf_file import stored_tensors as gguf_tensors
from drafters.checkpoints.quantized import (
    FIELD,
    OLD_FIELD,
    TensorFiles,
    check_settings,
    read_settings,
)
from drafters.checkpoints.quantized import stored_tensors as quantized_tensors
from drafters.checkpoints.stored import StoredTensor
from drafters.target_models import GENERATION_CONFIG, TargetModelError, check_target_model

LOGGER = logging.getLogger(__name__)


def load_config(model: Path) -> Any:
    """``read_config``; raises TargetModelError also for a model that cannot be represented exactly."""
    config = read_config(model)
    check_target_model(config)
    return config


def read_config(model: Path) -> Any:
    """The configuration, as of a model with float weights.

    Raises TargetModelError for files that are not supported, and what Transformers raises.
    """
    from transformers import AutoConfig

    if is_gguf(model):
        header = read_header(model)
        config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name, trust_remote_code=False)
        rope = rotary_settings(header, config)
        if rope:
            config.rope_parameters = rope
        for field, value in other_settings(header, config).items():
            setattr(config, field, value)
    else:
        settings = read_settings(model)
        if settings:
            check_settings(settings)
        _check_generation_config(model / GENERATION_CONFIG)
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    for name in (FIELD, OLD_FIELD):
        if hasattr(config, name):
            delattr(config, name)
    return config


def load_tokenizer(model: Path) -> Any:
    """The tokenizer. Raises what Transformers raises.

    Warns of a GGUF file whose text Transformers splits in another way than the file says.
    """
    from transformers import AutoTokenizer

    if is_gguf(model):
        found = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name, trust_remote_code=False)
        split = unknown_split(read_header(model), found)
        if split is not None:
            LOGGER.warning(
                "%s: %s: Transformers does not know %r and splits text as GPT-2 does, so prompts may become "
                "other tokens than the model was trained with; a Hugging Face directory is safer",
                *(model, TOKENIZER_PRE, split),
            )
        return found
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def load_model(model: Path, config: Any | None = None, **options: Any) -> Any:
    """The model with float weights.

    config: what ``load_config`` returned, to save reading it again
    options: of ``from_pretrained``, such as ``dtype``; only those of float directories may spread a model
        over devices
    Raises TargetModelError for weights that do not fit the model, and what Transformers raises.
    """
    from transformers import AutoModelForCausalLM

    if not is_gguf(model) and read_settings(model) is None:
        auto: Any = AutoModelForCausalLM
        found, info = auto.from_pretrained(
            model,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if config is None else {"config": config}),
            **options,
        )
        _check_info(model, info)
        return found
    if options.get("device_map"):
        raise TargetModelError(f"{model} is quantised, and --device-map expects a model with float weights")
    config = load_config(model) if config is None else config
    dtype = options.get("dtype")
    return _load_gguf(model, config, dtype) if is_gguf(model) else _load_quantized(model, config, dtype)


def write_directory(model: Path, out: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face directory with weights in float32."""
    import torch

    load_model(model, dtype=torch.float32).save_pretrained(out)
    load_tokenizer(model).save_pretrained(out)


def stored_tensors(model: Path) -> list[StoredTensor]:
    """The quantised tensors of a model's files; none for float weights."""
    if is_gguf(model):
        return gguf_tensors(read_header(model))
    settings = read_settings(model)
    return list(quantized_tensors(TensorFiles(model), settings)[0].values()) if settings else []


def _check_generation_config(path: Path) -> None:
    """Transformers leaves out a file that it cannot read, and the tokens that end a text would be others."""
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise TargetModelError(f"{path}: expected an object, got {values!r:.60}")
    found = values.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise TargetModelError(f"{path}: eos_token_id: expected a token's number or several, got {found!r}")


def _load_gguf(path: Path, config: Any, dtype: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    found, info = auto.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, output_loading_info=True
    )
    _check_info(path, info)
    header = read_header(path)
    found.generation_config.eos_token_id = end_token_ids(header) or None
    in_file = sum(
        math.prod(tensor.shape) for name, tensor in header.tensors.items() if not name.startswith("rope_")
    )
    in_model = sum(parameter.numel() for parameter in found.parameters())
    if in_file != in_model:
        # Transformers drops what it has no place for, such as biases, and the model would be another one.
        raise TargetModelError(
            f"{path} holds {in_file:,} weights, and the model that Transformers makes of it {in_model:,}"
        )
    # Transformers does not save a model that it knows as quantised.
    return _from_weights(path, config, found.state_dict(), dtype, found.generation_config)


def _load_quantized(directory: Path, config: Any, dtype: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    files = TensorFiles(directory)
    settings = read_settings(directory)
    assert settings is not None
    stored, parts = quantized_tensors(files, settings)
    if not stored:
        raise TargetModelError(
            f"{FIELD}.quant_method: {directory} has no tensor of {settings['quant_method']} in its files"
        )
    weights = {name: files.read(name).float() for name in sorted(files.names() - parts)}
    # Files of GPTQ may give every layer a bias, of zeros where the model has none.
    with torch.device("meta"):
        known = AutoModelForCausalLM.from_config(config).state_dict().keys()
    for bias in [name for name in weights if name.endswith(".bias") and name not in known]:
        if not weights[bias].any():
            del weights[bias]
    weights |= {name: tensor.dequantized() for name, tensor in stored.items()}
    generation = None
    if (directory / GENERATION_CONFIG).is_file():
        generation = GenerationConfig.from_pretrained(directory)
    return _from_weights(directory, config, weights, dtype, generation)


def _from_weights(
    model: Path, config: Any, weights: dict[str, Any], dtype: Any, generation: Any | None
) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    found, info = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    _check_info(model, info)
    found.config._name_or_path = ""
    if generation is not None:
        found.generation_config = generation
    return found


def _check_info(model: Path, info: Mapping[str, Any]) -> None:
    """Raises TargetModelError if a weight is missing, left over or of another shape."""
    for key, problem in (
        ("missing_keys", "expected this weight, got none"),
        ("unexpected_keys", "the model has no such weight"),
        ("mismatched_keys", "the weight has another shape than in the model"),
    ):
        names = sorted(map(str, info[key]))
        if names:
            raise TargetModelError(f"{model}: {names[0]}: {problem} ({len(names)} of this kind)")

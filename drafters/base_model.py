"""Whether a draft head was made for a target model: by a digest of the model's weights, or by its name."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafters.checkpoints.gguf_file import digest_tensors, is_gguf, read_header
from drafters.config import DrafterConfig, DrafterConfigError
from drafters.target_models import DIGEST_ROWS, digest_of, weights_digest

# The usual names of the two tensors that a digest is made of.
EMBEDDING, NORM = "embed_tokens.weight", "norm.weight"


def check_base_weights(config: DrafterConfig, model: Any) -> None:
    """Raises DrafterConfigError for a target model of other weights than the head was trained for.

    model: in float32, because rounded weights have another digest. A head that records no digest passes.
    """
    if config.base_weights and config.base_weights != weights_digest(model):
        raise DrafterConfigError(
            f"base_weights must be the target model's {weights_digest(model)}, got {config.base_weights}; "
            f"the head was trained for a model of other weights{_named(config)}"
        )


def check_base_name(config: DrafterConfig, name: str) -> None:
    """Raises DrafterConfigError for a target model of another name, if only names tell.

    A head that records a digest passes: the name of a directory may change.
    """
    recorded = config.base_model.rpartition("/")[2]
    if recorded and not config.base_weights and recorded != name.rpartition("/")[2]:
        raise DrafterConfigError(
            f"base_model must be the target model's name {name!r}, got {config.base_model!r}; the head "
            "records no digest of its model's weights"
        )


def _named(config: DrafterConfig) -> str:
    return f", {config.base_model!r}" if config.base_model else ""


def stored_weights_digest(model: Path) -> str:
    """``weights_digest`` of a model, computed from a directory's safetensors files or from a GGUF file.

    It does not depend on how the model was loaded. Returns "" if the two tensors cannot be found there by
    their usual names, as in a directory with other kinds of files.
    """
    if is_gguf(model):
        found = digest_tensors(read_header(model), DIGEST_ROWS)
        return digest_of(*found) if found else ""
    places: dict[str, Path] = {}
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except SafetensorError:
            return ""
    embeddings = [name for name in places if name.endswith(EMBEDDING)]
    if len(embeddings) != 1:
        return ""
    (embedding,) = embeddings
    norm = embedding.removesuffix(EMBEDDING) + NORM
    if norm not in places:
        return ""
    with safe_open(places[norm], framework="pt") as file:
        norm_weight = file.get_tensor(norm)
    with safe_open(places[embedding], framework="pt") as file:
        rows = file.get_slice(embedding)[:DIGEST_ROWS]
    return digest_of(norm_weight, rows)

"""Tensors of a model directory as they are stored: not rounded, and on no device."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from drafters.target_models import DIGEST_ROWS, digest_of

EMBEDDING, NORM = "embed_tokens.weight", "norm.weight"


def stored_weights_digest(directory: Path) -> str:
    """``weights_digest`` of the model in ``directory``, computed from its safetensors files.

    It does not depend on how the model was loaded. Returns "" if the two tensors cannot be found there by
    their usual names, as in a directory with other kinds of files.
    """
    places: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
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

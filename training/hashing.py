"""Hashes of what a run is made of: the target model's files and the data."""

import hashlib
from pathlib import Path


def fingerprint(model_dir: Path) -> str:
    """Hash of a model directory's configuration and weights."""
    digest = hashlib.sha256()
    for path in sorted(
        [*model_dir.glob("*.safetensors"), *model_dir.glob("*.bin"), model_dir / "config.json"]
    ):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # adds to it
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

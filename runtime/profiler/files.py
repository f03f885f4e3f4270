"""Writing the files of a report, all of them or none."""

import os
from pathlib import Path


def write_files(directory: Path, texts: dict[str, str]) -> list[Path]:
    """Write all files or none: each to a temporary name first, then renamed into place."""
    staged = [(directory / f".{name}.{os.getpid()}.tmp", directory / name) for name in texts]
    try:
        for (temporary, _), text in zip(staged, texts.values(), strict=True):
            temporary.write_text(text, encoding="utf-8")
        for temporary, path in staged:
            temporary.replace(path)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
    return [path for _, path in staged]

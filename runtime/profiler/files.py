"""Writing the files of a report, all of them or none."""

import os
from pathlib import Path

from runtime.core.errors import UserError


def check_out(out: Path) -> None:
    """Raise UserError if ``out`` cannot be a directory; creates nothing."""
    blocked = next((path for path in (out, *out.parents) if path.exists()), None)
    if blocked is not None and not blocked.is_dir():
        raise UserError(f"--out {out}: {blocked} is a file; expected a directory")


def write_files(directory: Path, texts: dict[str, str]) -> list[Path]:
    """Write all files or none: each to a temporary name first, then renamed into place."""
    directory.mkdir(parents=True, exist_ok=True)
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

"""The directories of a build: inputs have to be complete, and a bundle appears complete or not at all.

The check of the inputs takes less than a second and needs no torch. Whatever needs Transformers is checked
when the model is loaded (``export.source``).
"""

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from drafters.config import CONFIG_NAME, WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from drafters.model_files import WeightsError, check_model_files, check_weights
from drafters.target_models import TargetModelError
from export.errors import ExportError
from export.options import Options
from runtime.core.bundle import MANIFEST_NAME, FileRecord, sha256_of
from runtime.core.system import locked_directory

# What numpy says where a disk is full; its OSError has no number.
CUT_SHORT = re.compile(r"\d+ requested and \d+ written")


def draft_record_name(target: str) -> str:
    """The file by which a draft directory of ``--target TARGET`` is known."""
    return f"{target.replace('-', '_')}_draft.json"


def check_out(out: Path, marker: str = MANIFEST_NAME) -> None:
    """Raises ExportError if ``out`` cannot be written; creates nothing.

    It may be absent, empty, or a directory with the file ``marker``.
    """
    directory = out.resolve()
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"--out: {out} is a file; expected a directory")
    if os.path.ismount(directory):
        raise ExportError(f"--out: {out} is a mount point, which cannot be replaced; name a directory in it")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / marker).is_file():
        kind = "engine bundle" if marker == MANIFEST_NAME else f"directory with {marker}"
        raise ExportError(f"--out: {out} is not empty and is no {kind}; choose another directory")
    parent = next(path for path in directory.parents if path.exists())
    if not parent.is_dir():
        raise ExportError(f"--out: {parent} is a file; expected a directory")
    if not os.access(parent, os.W_OK):
        raise ExportError(f"--out: {parent} cannot be written; choose another directory")


@contextmanager
def bundle_directory(out: Path, marker: str = MANIFEST_NAME) -> Iterator[Path]:
    """A scratch directory beside ``out`` that replaces ``out`` when the block ends without an error.

    What builds of ``out`` that were killed have left is removed, or put back.

    ``out`` may be absent, empty or what was written there earlier, which has the file ``marker``. Raises
    ExportError, before anything is written, if it is something else, and when the file system refuses a file,
    for instance because the disk is full. An error of a file that is not in the scratch directory names it.
    """
    check_out(out, marker)
    given, out = out, out.resolve()  # the directory that a link leads to is replaced, and "." has a name
    # The number of a process is not its own alone where containers share a directory.
    number = uuid.uuid4().hex[:8]
    scratch, old = _beside(out, "partial", number), _beside(out, "old", number)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_up(out)
        check_out(given, marker)  # an earlier result may be back
        scratch.mkdir()
        with _lock(scratch):
            with _naming_others(scratch):
                yield scratch
            check_out(given, marker)  # others may have put files there meanwhile
            try:
                if out.exists():
                    out.rename(old)
                scratch.rename(out)
            except BaseException:
                if old.exists() and not out.exists():
                    old.rename(out)
                raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        if CUT_SHORT.search(reason):
            reason += "; the disk may be full"
        raise ExportError(f"--out: {given} cannot be written: {reason}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _naming_others(scratch: Path) -> Iterator[None]:
    """Raise an OSError of a file that is not in ``scratch`` as an ExportError that names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(str(error.filename)).is_relative_to(scratch):
            raise
        raise ExportError(f"{error.filename}: {error.strerror or error}") from error


def _beside(out: Path, kind: str, number: str) -> Path:
    """The directory beside ``out`` of a build with this number: ``partial`` is new, ``old`` was there."""
    return out.parent / f".{out.name}.{kind}-{number}"


@contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory, and say whether it was free; False where there are no locks, too."""
    with ExitStack() as held:
        try:
            is_held = held.enter_context(locked_directory(directory))
        except BlockingIOError:
            is_held = False
        yield is_held


def _clear_up(out: Path) -> None:
    """Remove what killed builds of ``out`` have left, gigabytes of a large model.

    A build that was killed while it replaced ``out`` has left none: what was there goes back.
    """
    for old in out.parent.glob(f".{glob.escape(out.name)}.old-*"):
        scratch = _beside(out, "partial", old.name.rpartition("-")[2])
        with suppress(OSError):  # it is gone, or it is another user's
            if scratch.exists():
                with _lock(scratch) as is_abandoned:
                    if not is_abandoned:
                        continue  # this build is about to put its own result there
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(out)
    for path in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        with suppress(OSError), _lock(path) as is_abandoned:
            # A build that has just begun may not have locked its directory yet.
            if is_abandoned and any(path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)


def identity(out: Path) -> int | None:
    """A number that changes when ``out`` is replaced; None where there is none."""
    try:
        return out.stat().st_ino
    except OSError:
        return None


def file_records(directory: Path) -> dict[str, FileRecord]:
    """Hash and size of every file in a directory, by name."""
    return {
        path.name: FileRecord(sha256_of(path), path.stat().st_size) for path in sorted(directory.iterdir())
    }


def check_inputs(model: Path, drafter: Path | None, out: Path, marker: str, options: Options) -> None:
    """Raises ExportError, which names the flag, if a model or a head is incomplete or ``out`` is not free.

    ``out`` is replaced as a whole, so it must hold neither of them, nor a file that the options name.

    marker: the file by which an earlier result in ``out`` is known
    """
    check_out(out, marker)
    for flag, path in (
        ("--model", model),
        ("--drafter", drafter),
        ("--quality-text", options.quality_text),
        ("--calibration-text", options.calibration_text),
        ("--timing-cache", options.timing_cache),
    ):
        if path is None:
            continue
        # A timing cache is written where there is none.
        is_used = path.exists() or flag == "--timing-cache"
        if is_used and path.resolve().is_relative_to(out.resolve()):
            raise ExportError(f"--out: {out} would be replaced, and {flag} {path} is in it")
    try:
        check_model_files(model)
    except TargetModelError as error:
        raise ExportError(f"--model: {error}") from error
    if drafter is None:
        return
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (drafter / name).is_file():
            raise ExportError(f"--drafter: {drafter} has no {name}; expected the directory of a draft head")
    try:
        DrafterConfig.load(drafter)
        check_weights(drafter / WEIGHTS_NAME)
    except (DrafterConfigError, WeightsError) as error:
        raise ExportError(f"--drafter: {error}") from error

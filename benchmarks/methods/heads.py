"""The draft heads a comparison runs, and the engine bundles it builds from them."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from benchmarks.arguments import read_json
from drafters.build import count_extra_parameters
from drafters.config import WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from export.options import OWN_PASS, VERIFY_PASS, Options
from runtime.core.baselines import SEARCHES
from runtime.core.bundle import Bundle, sha256_of
from runtime.core.errors import BundleError, UserError
from runtime.profiler.arguments import write_files
from runtime.profiler.runs import PLAIN

HEAD_FILES = ("config.json", "model.safetensors")
# A file in a bundle's directory that says what the bundle was built from.
SOURCES_NAME = "sources.json"
SEED_SUFFIX = re.compile(r"(?P<name>.+)-seed(?P<seed>\d+)")
EXPORTER = ("export", "drafters")
# Sizes in a head's config that must be the model's, and their names in the model's config.
SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "base_num_layers": "num_hidden_layers"}


@dataclass(frozen=True)
class Head:
    """A draft head under one search.

    label: the directory's name, with ``:SEARCH`` behind it if that is not the head's natural one, and
        ``:own`` for streams in a pass of their own
    method: the label without ``-seedN``, which ``seed`` holds
    params: number of the head's own parameters, without those that the target model has or that merge into it
    digests: sha256 by file name
    stream_pass: of speculative streams, one of ``STREAM_PASSES``; None for other heads
    fine_tunes: whether it changes the target model, so that its outputs are those of a model of its own
    """

    directory: Path
    label: str
    method: str
    seed: int | None
    search: str
    drafter_type: str
    params: int
    digests: dict[str, str]
    stream_pass: str | None = None
    fine_tunes: bool = False

    @property
    def drafts_in_verify_pass(self) -> bool:
        """Whether it needs a graph of the target model that drafts too."""
        return self.stream_pass == VERIFY_PASS


def natural_search(drafter_type: str, loss: str | None) -> str:
    """Return the search that makes a tree of a head's lattice unless ``--heads`` names another.

    A CTC head trained with the plain CTC loss is the seed paper's and gets that paper's search; any
    other head gets the prefix search.
    """
    return "paper" if (drafter_type, loss) == ("ctc", "ctc") else "prefix"


def split_seed(name: str) -> tuple[str, int | None]:
    """Split a directory's name. Example: "ctc-seed2" -> ("ctc", 2), "ctc" -> ("ctc", None)."""
    seeded = SEED_SUFFIX.fullmatch(name)
    return (seeded["name"], int(seeded["seed"])) if seeded else (name, None)


def default_heads(directory: Path, model_dir: Path) -> list[str]:
    """Return the draft heads in a directory that have the model's sizes. Raises UserError if none has."""
    model = read_json(model_dir / "config.json", "--model")
    found = []
    for path in sorted(directory.glob("*/config.json")):
        head = read_json(path, "--heads")
        if all(head.get(name) == model.get(of_model) for name, of_model in SIZES.items()):
            found.append(str(path.parent))
    if not found:
        raise UserError(f"--heads: there is no draft head for {model_dir} in {directory}; name one")
    return found


def find_heads(texts: Sequence[str], model_dir: Path) -> list[Head]:
    """Read the heads named ``DIR``, ``DIR:SEARCH`` or, for streams, ``DIR:own``. Raises UserError."""
    model = read_json(model_dir / "config.json", "--model")
    heads = [_head(*_split(text), model) for text in texts]
    directories: dict[str, Path] = {}
    labels: set[str] = set()
    for head in heads:
        known = directories.setdefault(head.directory.name, head.directory)
        if known.resolve() != head.directory.resolve():
            raise UserError(
                f"--heads: two directories are named {head.directory.name}: {known}, {head.directory}"
            )
        if head.label in labels:
            raise UserError(f"--heads: {head.label} is given twice")
        labels.add(head.label)
    return heads


def model_digests(model_dir: Path) -> dict[str, str]:
    """Return the sha256 of the files in a model directory, by name."""
    files = sorted(p for p in model_dir.iterdir() if p.is_file() and not p.name.startswith("."))
    return {path.name: sha256_of(path) for path in files}


def exporter_digest() -> str:
    """Return the sha256 of the sources that turn a head into a bundle."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for package in EXPORTER for path in (root / package).rglob("*.py")):
        digest.update(f"{path.parent.name}/{path.name}".encode() + path.read_bytes())
    return digest.hexdigest()


def count_parameters(path: Path) -> int:
    """Count the numbers in a safetensors file without reading them. Raises UserError naming the file."""
    try:
        with safe_open(path, "np") as weights:
            names = weights.keys()
            tensors = {name: weights.get_slice(name) for name in names}
            # The scales of 8-bit weights are no parameters.
            scales = {f"{name}.scale" for name in names if tensors[name].get_dtype() == "I8"}
            return sum(math.prod(tensors[name].get_shape()) for name in names if name not in scales)
    except OSError as error:
        raise UserError(f"--heads: {path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise UserError(f"--heads: {path} is no safetensors file: {error}") from error


def ensure_bundle(
    head: Head, model_dir: Path, model: Mapping[str, str], bundles: Path, options: Options
) -> Path:
    """Return the head's verified bundle, and build it unless one of the same files and exporter is there.

    model: ``model_digests`` of ``model_dir``
    Raises UserError and leaves nothing half-written.
    """
    own = f"-{OWN_PASS}-pass" if head.stream_pass == OWN_PASS else ""
    path = bundles / f"{head.directory.name}{own}"
    sources = json.dumps(
        {
            "head": head.digests,
            "model": dict(model),
            "exporter": exporter_digest(),
            "options": dataclasses.asdict(options),
        },
        indent=1,
    )
    with contextlib.suppress(BundleError, OSError):
        Bundle.load(path)
        if (path / SOURCES_NAME).read_text(encoding="utf-8") == sources:
            return path
    # Imported here because torch and the exporter take seconds.
    from transformers.utils.logging import disable_progress_bar

    from export.build_engines import build

    # The exporter's messages say nothing about the user's model, and stdout is for the table.
    disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore", FutureWarning)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        build(model_dir, path, drafter_dir=head.directory, options=options)
    write_files(path, {SOURCES_NAME: sources})
    return path


def _split(text: str) -> tuple[Path, str | None]:
    """Split ``DIR:WAY``; a directory may itself have a colon in its name."""
    directory, colon, way = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return Path(text), None
    if way not in (*SEARCHES, OWN_PASS):
        raise UserError(
            f"--heads: what follows a directory must be {OWN_PASS} or one of {', '.join(SEARCHES)}, got "
            f"{way!r} in {text}"
        )
    return Path(directory), way


def _head(directory: Path, way: str | None, model: dict[str, Any]) -> Head:
    """way: a search, ``own`` for streams in a pass of their own, or None for what is natural"""
    try:
        config = DrafterConfig.load(directory)
    except DrafterConfigError as error:
        raise UserError(f"--heads: {error}") from error
    for name, of_model in SIZES.items():
        found, wanted = getattr(config, name), model.get(of_model)
        if found != wanted:
            raise UserError(
                f"--heads: {directory}: {name} must be the model's {wanted}, got {found}; "
                "this head was made for another model"
            )
    training = directory / "training.json"
    origin = read_json(training, "--heads") if training.is_file() else {}
    parts = [part for part in (origin.get("head"), origin.get("settings")) if isinstance(part, dict)]
    loss = next((part["loss"] for part in parts if "loss" in part), None)
    natural = natural_search(config.drafter_type, loss)
    has_streams = config.trunk_type.borrows_layers
    if way == OWN_PASS and not has_streams:
        raise UserError(f"--heads: {directory}: {OWN_PASS} is for streams, got a {config.drafter_type} head")
    search = natural if way in (None, OWN_PASS) else way
    fine_tunes = config.stream_mode == "shared"
    name = directory.resolve().name
    suffix = f":{way}" if way not in (None, natural) else ""
    method, seed = split_seed(name)
    if name == PLAIN:
        raise UserError(f"--heads: {directory}: {PLAIN!r} is what plain decoding is called; rename the head")
    return Head(
        directory=directory,
        label=name + suffix,
        method=method + suffix,
        seed=seed,
        search=search,
        drafter_type=config.drafter_type,
        params=count_extra_parameters(config) if fine_tunes else count_parameters(directory / WEIGHTS_NAME),
        digests={name: sha256_of(directory / name) for name in HEAD_FILES},
        stream_pass=(OWN_PASS if way == OWN_PASS else VERIFY_PASS) if has_streams else None,
        fine_tunes=fine_tunes,
    )

"""The models of a comparison: a Hugging Face directory, converted for every engine, kept between runs."""

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.methods.heads import exporter_digest, model_digests
from benchmarks.peers.engines import DRAFT, SCALE_FLAGS, Engine
from benchmarks.peers.worker import Worker, WorkerError
from drafters.checkpoints.gguf_file import SUFFIX, is_gguf
from drafters.checkpoints.loading import write_directory
from runtime.core.bundle import sha256_of
from runtime.core.errors import UserError

# A file beside the models that says what they were made of.
SOURCES_NAME = "{}.json"
# Reading all files takes a while.
_digests = cache(model_digests)


@dataclass(frozen=True)
class Models:
    """The models in a directory.

    root: where they are kept
    source: Hugging Face directory of the model
    drafter: draft head of ours, or None
    scales: what shares a scale in our weights, by their precision; the default of ``ctc build`` where absent
    """

    root: Path
    source: Path
    drafter: Path | None
    scales: Mapping[str, str] = field(default_factory=dict)

    def ensure(self, engine: Engine, method: str, precision: str) -> Path:
        """Return the directory of an engine's files; they are made unless the same are there.

        Raises WorkerError and leaves nothing half-written.
        """
        name = self._name(engine, method, precision)
        drafter = self.drafter if method == DRAFT else None
        sources = json.dumps(self._sources(engine, precision, drafter), indent=1)
        path, record = self.root / name, self.root / SOURCES_NAME.format(name)
        if _is_made(path, record, sources):
            return path
        print(f"converting the model for {name}", file=sys.stderr, flush=True)
        record.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        flags = ["--drafter", str(drafter)] if drafter else []
        if engine.is_ours and precision in self.scales:
            flags += [SCALE_FLAGS[precision][0], self.scales[precision]]
        try:
            # A process of its own gives its memory back.
            with closing(Worker(self.root / f"{name}.log")) as worker:
                worker.convert(engine, self.source, path, precision, flags)
        except WorkerError:
            shutil.rmtree(path)
            raise
        record.write_text(sources, encoding="utf-8")
        return path

    def _name(self, engine: Engine, method: str, precision: str) -> str:
        """Name of the directory of an engine's files, which methods share unless one needs a head."""
        name = "ours" if engine.is_ours else engine.name
        name = f"{name}-{DRAFT}-{precision}" if method == DRAFT else f"{name}-{precision}"
        if not engine.is_ours or precision not in SCALE_FLAGS:
            return name
        _, default = SCALE_FLAGS[precision]
        scales = self.scales.get(precision, default)
        return name if scales == default else f"{name}-{scales}"

    def _sources(self, engine: Engine, precision: str, drafter: Path | None) -> Mapping[str, object]:
        """What files are made of: digests of the model, and the version of what converts it.

        Engines that share their files have the same.
        """
        return {
            "model": _digests(self.source),
            "drafter": _digests(drafter) if drafter else None,
            "converter": [engine.convert.__name__, engine.forms[precision]],
            "version": exporter_digest() if engine.is_ours else engine.version(),
        }


def _is_made(path: Path, record: Path, sources: str) -> bool:
    return path.is_dir() and record.is_file() and record.read_text(encoding="utf-8") == sources


def hugging_face_directory(model: Path, root: Path) -> Path:
    """Return the model as a Hugging Face directory; a GGUF file is written as one, in float32, once.

    The directory has the file's name, by which a head knows its model that records no digest of the weights.
    Raises UserError if the model is neither.
    """
    if model.is_dir() and (model / "config.json").is_file():
        return model
    if not is_gguf(model):
        problem = f"{model} is neither a Hugging Face model directory nor a file {SUFFIX}"
        raise UserError(f"--model: {problem}")
    out, record = root / "source" / model.stem, root / SOURCES_NAME.format("source")
    digest = json.dumps({model.name: sha256_of(model)})
    if not _is_made(out, record, digest):
        record.unlink(missing_ok=True)
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        write_directory(model, out)
        record.write_text(digest, encoding="utf-8")
    return out

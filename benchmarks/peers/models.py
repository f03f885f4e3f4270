"""The models of a comparison: a Hugging Face directory, converted for every engine, kept between runs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.methods.heads import exporter_digest, model_digests
from benchmarks.peers.engine import DRAFT, SCALE_FLAGS, Engine, model_files
from drafters.checkpoints.gguf_file import SUFFIX, is_gguf
from drafters.checkpoints.loading import write_directory
from runtime.core.bundle import sha256_of
from runtime.core.errors import UserError

# A file beside the models that says what they were made of.
SOURCES_NAME = "{}.json"
CONVERT = (sys.executable, "-m", "benchmarks.peers.convert")


class ConversionError(UserError):
    """An engine that has no form of the model; the message is the last line of what was printed."""


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

        Raises ConversionError and leaves nothing half-written.
        """
        name = self._name(engine, method, precision)
        drafter = self.drafter if method == DRAFT else None
        sources = json.dumps(self._sources(engine, precision, drafter), indent=1)
        path, record = self.root / name, self.root / SOURCES_NAME.format(name)
        if path.is_dir() and record.is_file() and record.read_text(encoding="utf-8") == sources:
            return path
        print(f"converting the model for {name}", file=sys.stderr, flush=True)
        record.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        command = [*CONVERT, "--engine", engine.name, "--model", str(self.source)]
        command += ["--precision", precision]
        command += ["--scales", self.scales[precision]] if engine.is_ours and precision in self.scales else []
        command += ["--out", str(path)]
        command += ["--drafter", str(drafter)] if drafter else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (self.root / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            shutil.rmtree(path, ignore_errors=True)
            last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise ConversionError(last[-1])
        record.write_text(sources, encoding="utf-8")
        return path

    def _name(self, engine: Engine, method: str, precision: str) -> str:
        """Name of the directory of an engine's files."""
        name = model_files(engine, method, precision)
        if not engine.is_ours or precision not in SCALE_FLAGS:
            return name
        _, default = SCALE_FLAGS[precision]
        scales = self.scales.get(precision, default)
        return name if scales == default else f"{name}-{scales}"

    @cached_property
    def _digests(self) -> dict[str, dict[str, str] | None]:
        """Of the model and of the draft head; reading them takes a while."""
        return {
            "model": model_digests(self.source),
            "drafter": model_digests(self.drafter) if self.drafter else None,
        }

    def _sources(self, engine: Engine, precision: str, drafter: Path | None) -> Mapping[str, object]:
        """What files are made of: digests of the model, and the version of what converts it.

        Engines that share their files have the same.
        """
        return {
            "model": self._digests["model"],
            "drafter": self._digests["drafter"] if drafter else None,
            "converter": [engine.module, engine.forms[precision]],
            "version": exporter_digest() if engine.is_ours else engine.version(),
        }


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
    if not (out.is_dir() and record.is_file() and record.read_text(encoding="utf-8") == digest):
        record.unlink(missing_ok=True)
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        write_directory(model, out)
        record.write_text(digest, encoding="utf-8")
    return out

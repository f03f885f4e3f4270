"""Finding tritonserver and what it needs to run: the container's, or the nvidia-pytriton wheel's."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import UserError
from triton_repo.config import MODELS, model_config

CONTAINER = Path("/opt/tritonserver")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Installation:
    """A server binary; ``backends`` and ``libraries`` are None where it finds its own."""

    binary: Path
    backends: Path | None
    libraries: Path | None


def find_server() -> Installation:
    """On PATH, in the container's place, or in the wheel. Raises UserError where it is in none."""
    found = shutil.which("tritonserver")
    if found:
        return Installation(Path(found), None, None)
    if (CONTAINER / "bin" / "tritonserver").is_file():
        return Installation(CONTAINER / "bin" / "tritonserver", None, None)
    spec = find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        home = package / "tritonserver"
        if (home / "bin" / "tritonserver").is_file():
            libraries = package.parent / "nvidia_pytriton.libs"
            return Installation(home / "bin" / "tritonserver", home, libraries)
    raise UserError(
        f"tritonserver is neither on PATH nor in {CONTAINER}, nor in an installed nvidia-pytriton: "
        "pip install -c constraints.txt -e '.[serve]', or run inside NVIDIA's Triton container"
    )


def write_repository(
    directory: Path,
    names: list[str],
    parameters: Mapping[str, str],
    *,
    num_instances: int = 1,
    gpus: Sequence[int] = (),
) -> None:
    """The models' files, with these parameters and instances in their ``config.pbtxt``."""
    for name in names:
        shutil.copytree(
            ROOT / "triton_repo" / "models" / name,
            directory / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        text = model_config(name, MODELS[name], parameters, num_instances=num_instances, gpus=gpus)
        (directory / name / "config.pbtxt").write_text(text, encoding="utf-8")


def write_backend(directory: Path, home: Path) -> None:
    """A backend directory with the stub of this Python beside the Python backend."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise UserError(f"python: nvidia-pytriton has no backend for Python {version}")
    target = directory / "python"
    target.mkdir(parents=True)
    for file in (*(home / "backends" / "python").iterdir(), stub):
        if file.is_file():
            shutil.copy(file, target / file.name)
    (target / stub.name).chmod(0o755)


def environment(installation: Installation) -> dict[str, str]:
    """The server's environment: this Python's packages, and this project, for the stub it starts."""
    found = dict(os.environ)
    packages = [str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found["PYTHONPATH"] = _joined(dict.fromkeys(packages), found.get("PYTHONPATH"))
    # The stub takes the first python3 on PATH for its own.
    found["PATH"] = _joined([str(Path(sys.executable).parent)], found.get("PATH"))
    if installation.libraries is not None:
        libraries = [str(installation.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        found["LD_LIBRARY_PATH"] = _joined(libraries, found.get("LD_LIBRARY_PATH"))
    return found


def _joined(first: "list[str] | dict[str, None]", rest: str | None) -> str:
    return os.pathsep.join([*(path for path in first if path), *([rest] if rest else [])])

"""Find tritonserver, in a container or in the nvidia-pytriton wheel, and write what it needs to run."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.core.errors import UserError
from triton_repo.triton.config import REPOSITORY, config_text

CONTAINER = Path("/opt/tritonserver")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installation:
    """A server binary, its backends and its libraries; None if the binary finds them by itself."""

    binary: Path
    backends: Path | None
    libraries: Path | None


def find_server() -> Installation:
    """Look on PATH, in NVIDIA's container and in the wheel. Raises UserError if none has a server."""
    binary = shutil.which("tritonserver")
    if binary:
        return Installation(Path(binary), None, None)
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
        "pip install -c constraints.txt -e '.[cpu,serve]', or run inside NVIDIA's Triton container"
    )


def write_repository(
    directory: Path,
    names: list[str],
    parameters: Mapping[str, str],
    *,
    num_instances: int = 1,
    gpus: Sequence[int] | None = None,
) -> None:
    """Copy these models to a directory, with these parameters and instances in their ``config.pbtxt``."""
    for name in names:
        shutil.copytree(REPOSITORY / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        text = config_text(name, parameters, num_instances=num_instances, gpus=gpus)
        (directory / name / "config.pbtxt").write_text(text, encoding="utf-8")


def write_backend(directory: Path, home: Path) -> None:
    """Write a backend directory: the Python backend of the wheel, with the stub for this Python's version."""
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
    """The server's environment, in which its stub finds this Python, its packages and this project."""
    variables = dict(os.environ)
    packages = [str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    variables["PYTHONPATH"] = _joined(dict.fromkeys(packages), variables.get("PYTHONPATH"))
    # The stub takes its prefix from the first python3 on PATH.
    variables["PATH"] = _joined([str(Path(sys.executable).parent)], variables.get("PATH"))
    if installation.libraries is not None:
        libraries = [str(installation.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        variables["LD_LIBRARY_PATH"] = _joined(libraries, variables.get("LD_LIBRARY_PATH"))
    return variables


def _joined(first: Iterable[str], rest: str | None) -> str:
    return os.pathsep.join([*(path for path in first if path), *([rest] if rest else [])])

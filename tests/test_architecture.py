"""Which package may import which: arrows go down, and the runtime needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("benchmarks", "demo", "drafters", "export", "runtime", "training", "triton_repo")
NOT_AT_RUNTIME = {"torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir"}

FORBIDDEN = {
    "runtime": NOT_AT_RUNTIME | set(OURS) - {"runtime"},
    "triton_repo": NOT_AT_RUNTIME | set(OURS) - {"runtime", "triton_repo"},
    "training": {"export", "demo", "benchmarks", "triton_repo"},
    "export": {"training", "demo", "benchmarks", "triton_repo"},
    "drafters": set(OURS) - {"drafters"},
}
ALLOWED = {
    "runtime": {"runtime", "numpy", "numba", "onnxruntime", "tokenizers", "tqdm"},
    "triton_repo": {
        "triton_repo",
        "runtime",
        "numpy",
        "aiohttp",
        "grpc",
        "tritonclient",
        "triton_python_backend_utils",
    },
    "drafters": {"drafters", "torch", "safetensors"},
}

IMPORT_WITHOUT_TORCH = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(len(sys.argv) - 2, sorted(BLOCKED & set(sys.modules)))
"""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(source: Path) -> Iterator[str]:
    """The top-level names a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.relative_to(ROOT)}:{node.lineno}: relative import"
            yield (node.module or "").partition(".")[0]


def modules(package: str) -> list[str]:
    names = [".".join(s.relative_to(ROOT).with_suffix("").parts) for s in sources(package)]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_nothing_from_above(package: str) -> None:
    assert sources(package), f"{package} has no sources: this test would test nothing"
    for source in sources(package):
        found = FORBIDDEN[package] & set(imports(source))
        assert not found, f"{source.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_only_what_it_declares(package: str) -> None:
    for source in sources(package):
        found = set(imports(source)) - ALLOWED[package] - set(sys.stdlib_module_names)
        assert not found, f"{source.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("package", [name for name in OURS if (ROOT / name).is_dir()])
def test_init_is_a_docstring_and_nothing_else(package: str) -> None:
    for source in (ROOT / package).rglob("__init__.py"):
        body = ast.parse(source.read_text(encoding="utf-8")).body
        assert len(body) == 1, source
        assert isinstance(body[0], ast.Expr), source
        assert isinstance(body[0].value, ast.Constant), source
        assert isinstance(body[0].value.value, str), source


def import_all(names: list[str], blocked: set[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, ",".join(sorted(blocked)), *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_every_runtime_module_imports_without_torch() -> None:
    names = modules("runtime")
    assert {"runtime", "runtime.decoder", "runtime.engines.ort"} <= set(names)
    result = import_all(names, FORBIDDEN["runtime"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{len(names)} []"


def test_the_blocker_blocks() -> None:
    """Guards the test above: the same command fails for a module that does need torch."""
    result = import_all(["drafters.attention"], {"torch"})
    assert result.returncode != 0
    assert "torch is blocked" in result.stderr

"""Rules for imports that the contracts of import-linter in pyproject.toml cannot express."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# What users import from; tests/ctc_speculator/test_names.py has its rules.
FACADE = ROOT / "ctc_speculator"
# Names of before, which hold nothing of their own.
OLD_NAMES = {"hf_generate", "vllm_plugin"}
NOT_AT_RUNTIME = {"torch", "transformers", "peft", "safetensors", "onnx", "onnxscript", "onnx_ir"}

# Bundles of the target torch alone import this package.
WITH_TORCH = "runtime.device.pytorch"

ALLOWED = {
    WITH_TORCH: {WITH_TORCH, "runtime", "numpy", "onnx", "torch"},
    "runtime": {
        "runtime",
        "jinja2",
        "llguidance",
        "msgspec",
        "numba",
        "numpy",
        "onnxruntime",
        "prompt_toolkit",
        "tokenizers",
        "tqdm",
    },
    "triton_repo": {
        "triton_repo",
        "runtime",
        "numpy",
        "aiohttp",
        "google",
        "grpc",
        "jinja2",
        "msgspec",
        "tritonclient",
        "triton_python_backend_utils",
        "opentelemetry",
    },
    # peft and transformers for streams alone, which run through layers of a target model.
    "drafters": {
        "gguf",
        "msgspec",
        "numpy",
        "drafters",
        "torch",
        "safetensors",
        "peft",
        "transformers",
        "huggingface_hub",
    },
    "integrations.vllm": {"integrations", "integrations.vllm", "drafters", "torch", "vllm"},
    "integrations.sglang": {"integrations", "integrations.sglang", "drafters", "sglang", "torch"},
    "integrations.tensorrt_llm": {
        "integrations",
        "integrations.tensorrt_llm",
        "drafters",
        "tensorrt_llm",
        "torch",
    },
    "integrations.transformers": {
        "integrations",
        "integrations.transformers",
        "drafters",
        "runtime",
        "numpy",
        "torch",
        "transformers",
    },
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


def modules(package: str) -> list[str]:
    names = [".".join(s.relative_to(ROOT).with_suffix("").parts) for s in sources(package)]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_every_package_is_under_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert settings["importlinter"]["root_packages"] == OURS
    assert {"runtime", "training", "export"} <= set(OURS)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_only_what_it_declares(package: str) -> None:
    root = package.partition(".")[0]
    graph = grimp.build_graph(root, include_external_packages=True, cache_dir=None)
    own = {package, *graph.find_descendants(package)}
    if package != WITH_TORCH:
        own = {name for name in own if not name.startswith(WITH_TORCH)}
    imported = {name for module in own for name in graph.find_modules_directly_imported_by(module)}
    found = {package if name.startswith(package) else name.partition(".")[0] for name in imported}
    assert package in found
    assert found <= ALLOWED[package] | sys.stdlib_module_names


@pytest.mark.parametrize("package", sorted(set(OURS) - OLD_NAMES))
def test_init_is_a_docstring_and_nothing_else(package: str) -> None:
    for source in (ROOT / package).rglob("__init__.py"):
        if source.parent == FACADE:
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), source
        assert len(tree.body) == 1, source


@pytest.mark.parametrize("package", sorted(OLD_NAMES))
def test_an_old_name_is_imports_and_nothing_else(package: str) -> None:
    for source in sources(package):
        body = ast.parse(source.read_text(encoding="utf-8")).body[1:]
        if source.stem == "publish":
            assert isinstance(body.pop(), ast.If), source  # it is run as a module
        assert isinstance(body.pop(), ast.Assign), source
        for node in body:
            assert isinstance(node, ast.ImportFrom), source
            assert node.module is not None
            assert node.module.startswith("integrations."), source


def import_all(names: list[str], blocked: set[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, ",".join(sorted(blocked)), *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_every_runtime_module_imports_without_torch() -> None:
    names = [name for name in modules("runtime") if not name.startswith(WITH_TORCH)]
    assert {"runtime", "runtime.decoder", "runtime.engines.ort"} <= set(names)
    result = import_all(names, NOT_AT_RUNTIME)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{len(names)} []"


def test_the_blocker_blocks() -> None:
    """The command of the test above fails for a module that needs torch."""
    result = import_all(["drafters.attention"], {"torch"})
    assert result.returncode != 0
    assert "torch is blocked" in result.stderr


def test_heads_in_transformers_use_public_names_only() -> None:
    """A private name of Transformers may change with any version."""
    for source in sources("integrations/transformers"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                assert not node.attr.startswith("_") or node.attr.startswith("__"), (source, node.attr)
            if isinstance(node, ast.ImportFrom):
                assert not any(alias.name.startswith("_") for alias in node.names), source

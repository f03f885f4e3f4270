"""The runtime with its declared dependencies and nothing else installed."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def closure(*roots: str) -> set[str]:
    """``roots`` and all distributions that they need without extras, directly or through others."""
    found = set(roots)
    queue = list(roots)
    while queue:
        for requirement in importlib.metadata.requires(queue.pop()) or []:
            if "extra ==" in requirement:
                continue
            required = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if required in found:
                continue
            try:
                importlib.metadata.distribution(required)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform or Python version
            found.add(required)
            queue.append(required)
    return found


def test_decodes_with_the_declared_dependencies_only(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    # Which ONNX Runtime (onnxruntime, onnxruntime-gpu) is the user's choice: the extras "cpu" and "gpu".
    names = closure("ctc-speculator", "onnxruntime") - {"ctc-speculator"}
    assert {"numpy", "onnxruntime", "tokenizers", "numba", "msgspec", "tqdm"} <= names
    assert not {"torch", "transformers", "onnx"} & names
    site = tmp_path / "site"
    site.mkdir()
    for name in names:
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            link = site / top
            if top != ".." and not link.exists():
                link.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    (site / "runtime").symlink_to(ROOT / "runtime")
    script = "import sys; from runtime.generate import main; code = main(sys.argv[1:]); "
    script += "print(sorted({'torch', 'transformers', 'onnx'} & set(sys.modules))); sys.exit(code)"
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompt", "hello", "--max-new-tokens", "12", "--json"]
    result = subprocess.run(
        [sys.executable, "-S", "-c", script, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    completion, imported = result.stdout.splitlines()
    assert len(json.loads(completion)["token_ids"]) == 12
    assert imported == "[]"

"""A bundle as a whole: round trip, atomicity, and checks that find a wrong graph."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from msgspec.structs import replace

from drafters.parallel import ParallelDrafter
from export import build_engines, pipeline
from export.build_engines import build, report
from export.directories import bundle_directory
from export.draft_directory import write_record
from export.errors import ExportError
from export.options import DraftOrder, Options
from export.source import load_source
from export.verify.heads import check_parallel, parallel_reference
from export.verify.runner import GraphRunner
from export.verify.target_model import check_target_model, target_model_reference
from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.system import installed_versions
from runtime.engines.operators import operator_library


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def change_weight(directory: Path, graph: str, shape: list[int], factor: float) -> None:
    """Multiply one weight of a stored graph."""
    path = directory / graph
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if list(tensor.dims) == shape:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * factor, tensor.name)
            )
            break
    else:
        raise AssertionError(f"no weight of shape {shape}")
    (directory / f"{graph}.data").unlink()
    onnx.save(model, path)


@pytest.fixture
def bundle_copy(tiny_bundle_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle_dir, tmp_path / "copy")


def test_round_trip(tiny_bundle_dir: Path, tiny_model_dir: Path) -> None:
    bundle = Bundle.load(tiny_bundle_dir)
    manifest = bundle.manifest
    assert sorted(path.name for path in tiny_bundle_dir.iterdir()) == sorted([*manifest.files, "bundle.json"])
    assert set(manifest.files) == {
        "backbone.compiled.onnx",
        "backbone.onnx",
        "backbone.onnx.data",
        "chat_template.jinja",
        "drafter.compiled.onnx",
        "drafter.onnx",
        "drafter.onnx.data",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
    }
    assert (manifest.target, manifest.precision) == ("onnxruntime", "fp32")
    model = manifest.model
    assert (model.architecture, model.vocab_size, model.num_layers) == ("LlamaForCausalLM", 258, 2)
    assert (model.num_kv_heads, model.head_dim, model.feature_size) == (2, 16, 128)
    assert (model.eos_token_ids, model.bos_token_id) == ((0,), None)
    assert (model.prompt_prefix, model.prompt_suffix) == ("Q: ", "\nA:")
    assert manifest.drafter is not None
    assert (manifest.drafter.drafter_type, manifest.drafter.num_frames) == ("ctc", 4)
    assert (manifest.drafter.merges_repeats, manifest.drafter.calibration) == (True, None)
    assert set(manifest.graphs) == {"backbone", "drafter"}
    of_graphs = {
        "backbone": {"prefill", "tree", "equal_argmax"},
        "drafter": {"prefill", "step", "equal_argmax"},
    }
    compared = ["", ".compiled"] if operator_library() else [""]
    assert {name: set(checks) for name, checks in manifest.validation.items()} == {
        f"{name}{form}": checks for name, checks in of_graphs.items() for form in compared
    }
    assert {checks["equal_argmax"] for checks in manifest.validation.values()} == {1}
    assert manifest.quality is None
    assert set(manifest.versions) >= {"torch", "transformers", "onnx", "onnxruntime", "ctc-speculator"}
    assert str(tiny_model_dir.parent) not in (tiny_bundle_dir / "bundle.json").read_text(encoding="utf-8")


def test_a_checkout_that_is_not_installed_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has onnxruntime where the wheel is onnxruntime-gpu."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("ctc-speculator", "onnxruntime"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_versions().keys() == {"torch", "transformers", "onnx", "onnxscript", "tokenizers"}
    write_record(tmp_path, "vllm", DraftOrder(tmp_path, tmp_path, tmp_path, Options()), {"model": "m"})
    record = json.loads((tmp_path / "vllm_draft.json").read_text(encoding="utf-8"))
    assert record == {"drafter": str(tmp_path), "arguments": {"model": "m"}}


def test_a_missing_chat_template_is_said(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Bundle.load(tiny_bundle_dir, verify=False).manifest
    line = "the tokenizer has no chat template, so prompts are given to the model as plain text\n"
    report(manifest)
    assert line not in capsys.readouterr().out
    spec = replace(manifest.model, prompt_prefix="", prompt_suffix="")
    report(replace(manifest, model=spec))
    assert line in capsys.readouterr().out


def test_drafter_graph(tiny_bundle_dir: Path) -> None:
    graph = onnx.load(tiny_bundle_dir / "drafter.onnx", load_external_data=False)
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("RotaryEmbedding") == 2  # queries and keys of one layer
    assert kinds.count("RMSNormalization") == 6  # two features, context, two of the layer, the last
    assert kinds.count("Attention") == 1


def test_a_wrong_weight_is_found(
    bundle_copy: Path,
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    open_graph: Callable[[Path, str], GraphRunner],
) -> None:
    source = load_source(tiny_model_dir, tiny_drafter_dir)
    expected = target_model_reference(source)
    check_target_model(open_graph(bundle_copy, "backbone"), expected)
    change_weight(bundle_copy, "backbone.onnx", [128, 64], 1.01)
    with pytest.raises(ExportError, match="prefill logits: the graph differs from PyTorch by"):
        check_target_model(open_graph(bundle_copy, "backbone"), expected)
    assert isinstance(source.drafter, ParallelDrafter)
    lattice = parallel_reference(source.drafter, expected.prefill_features, width=Options.top_k)
    check_parallel(open_graph(bundle_copy, "drafter"), lattice)
    change_weight(bundle_copy, "drafter.onnx", [64, 258], 1.01)
    with pytest.raises(ExportError, match=r"drafter prefill .*: the graph differs from PyTorch by"):
        check_parallel(open_graph(bundle_copy, "drafter"), lattice)


def test_a_wrong_attention_scale_leaves_no_bundle(
    bundle_copy: Path,
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build that fails its own check keeps the earlier bundle and no scratch directory."""
    before = snapshot(bundle_copy)

    def trace(module: Any, contract: GraphSpec) -> ir.Model:
        """The graph that is there already, but for the scale."""
        is_backbone = any(tensor.name == "input_ids" for tensor in contract.inputs)
        model = ir.load(bundle_copy / ("backbone.onnx" if is_backbone else "drafter.onnx"))
        for constant in model.graph.initializers.values():
            tensor = constant.const_value
            if tensor is not None and tensor.numpy().size == 1 and tensor.numpy().item() == 16**-0.5:
                constant.const_value = ir.tensor(tensor.numpy() * np.float32(1.01), name=constant.name)
        return model

    monkeypatch.setattr(pipeline, "trace_standard", trace)
    with pytest.raises(ExportError, match="prefill logits: the graph differs from PyTorch"):
        build(tiny_model_dir, bundle_copy, drafter_dir=tiny_drafter_dir)
    assert snapshot(bundle_copy) == before
    assert [path.name for path in tmp_path.iterdir()] == [bundle_copy.name]


def test_bundle_directory_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "bundle"
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("1", encoding="utf-8")
        assert not out.exists()

    def fail_halfway() -> None:
        with bundle_directory(out) as scratch:
            (scratch / "bundle.json").write_text("2", encoding="utf-8")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert (out / "bundle.json").read_text(encoding="utf-8") == "1"
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("3", encoding="utf-8")
    assert (out / "bundle.json").read_text(encoding="utf-8") == "3"
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    link = tmp_path / "link"
    link.symlink_to(out)
    for number, where in enumerate((link, Path()), 4):
        with monkeypatch.context() as patch:
            patch.chdir(out)
            with bundle_directory(where) as scratch:
                (scratch / "bundle.json").write_text(str(number), encoding="utf-8")
        assert (out / "bundle.json").read_text(encoding="utf-8") == str(number)
    assert link.readlink() == out
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


def test_builds_into_one_directory_do_not_touch_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of containers that share a directory may have the same number."""
    out = tmp_path / "bundle"
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("1", encoding="utf-8")
        with bundle_directory(out) as other:
            (other / "bundle.json").write_text("2", encoding="utf-8")
    assert (out / "bundle.json").read_text(encoding="utf-8") == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_a_killed_build_leaves_goes_with_the_next(tmp_path: Path) -> None:
    out = tmp_path / "bundle[1]"
    script = "import os, pathlib, signal, sys; from export.directories import bundle_directory\n"
    script += "with bundle_directory(pathlib.Path(sys.argv[1])) as scratch:\n"
    script += "    (scratch / 'weights').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(out)], cwd=root, check=False)
    (left,) = tmp_path.iterdir()
    assert [path.name for path in left.iterdir()] == ["weights"]
    with bundle_directory(tmp_path / "bundle") as scratch:
        (scratch / "bundle.json").touch()
    assert left.exists()  # of another build
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").touch()
        assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "bundle[1]"}


def test_what_was_there_goes_back_after_a_kill_between_both_renames(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("1", encoding="utf-8")
    old, scratch = out.rename(tmp_path / ".bundle.old-12ab34cd"), tmp_path / ".bundle.partial-12ab34cd"
    scratch.mkdir()
    (scratch / "bundle.json").touch()
    with bundle_directory(tmp_path / "other") as other, bundle_directory(out) as next_one:
        assert {path.name for path in tmp_path.iterdir()} == {"bundle", next_one.name, other.name}
        assert (out / "bundle.json").read_text(encoding="utf-8") == "1"
        (next_one / "bundle.json").write_text("2", encoding="utf-8")
        (other / "bundle.json").touch()
    shutil.copytree(out, old)  # of a build that was killed before it had removed it
    with bundle_directory(out) as scratch:
        assert not old.exists()
        assert (out / "bundle.json").read_text(encoding="utf-8") == "2"
        (scratch / "bundle.json").touch()
    out.rename(old)
    with pytest.raises(ExportError, match=r"is no directory with draft\.json"):
        bundle_directory(out, "draft.json").__enter__()
    assert out.exists()


def test_ctrl_c_while_the_old_bundle_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one is in its place, and the next build removes the old one."""
    out = tmp_path / "bundle"
    remove = shutil.rmtree

    def interrupt(path: Path, **options: Any) -> None:
        if ".old-" in path.name:
            raise KeyboardInterrupt
        remove(path, **options)

    def write(text: str) -> None:
        with bundle_directory(out) as scratch:
            (scratch / "bundle.json").write_text(text, encoding="utf-8")

    write("1")
    monkeypatch.setattr(build_engines, "check_inputs", lambda *_: write("2"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        assert build_engines.main(["--model", "model", "--out", str(out)]) == 130
    assert capsys.readouterr().err == f"build_engines: interrupted, {out} is complete\n"
    assert (out / "bundle.json").read_text(encoding="utf-8") == "2"
    write("3")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left"), "--out: {out} cannot be written: No space left"),
        (
            OSError("16384 requested and 5888 written"),
            "--out: {out} cannot be written: 16384 requested and 5888 written; the disk may be full",
        ),
        (OSError(13, "Permission denied", "/model/x.safetensors"), "/model/x.safetensors: Permission denied"),
    ],
)
def test_an_error_of_the_file_system_names_its_place(tmp_path: Path, error: OSError, message: str) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(ExportError) as found, bundle_directory(out):
        raise error
    assert str(found.value) == message.format(out=out)
    assert not list(tmp_path.iterdir())


def test_files_that_come_while_a_bundle_is_built_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "bundle"

    def build_beside_another() -> None:
        with bundle_directory(out) as scratch:
            (scratch / "bundle.json").write_text("1", encoding="utf-8")
            out.mkdir()
            (out / "notes.txt").write_text("mine", encoding="utf-8")

    with pytest.raises(ExportError, match=r"^--out: .* is not empty and is no engine bundle"):
        build_beside_another()
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "notes.txt"]


def test_a_bundle_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    with bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("1", encoding="utf-8")
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(ExportError, match="No space left"), bundle_directory(out) as scratch:
        (scratch / "bundle.json").write_text("2", encoding="utf-8")
    assert (out / "bundle.json").read_text(encoding="utf-8") == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

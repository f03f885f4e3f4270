"""Bundles of engines, one of which computes something else."""

import shutil
from pathlib import Path

import onnx
from msgspec.structs import replace

from export.directories import file_records
from runtime.core.bundle import MANIFEST_NAME, Bundle


def with_wrong_engine(source: Path, out: Path, graph: str, tensor: str) -> Path:
    """A copy of a bundle of ``tests.engine_bundles`` where one graph adds 1 to one of its outputs."""
    shutil.copytree(source, out)
    right = Path((source / f"{graph}.engine").read_text(encoding="utf-8"))
    wrong = (out.with_name(f"{out.name}.plans") / right.name).resolve()
    wrong.parent.mkdir()
    shutil.copy(right.with_name(f"{right.name}.data"), wrong.parent)
    model = onnx.load(right, load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{tensor}_right" if name == tensor else name for name in names]
    (found,) = [each for each in model.graph.output if each.name == tensor]
    one = onnx.helper.make_tensor("one_more", found.type.tensor_type.elem_type, [], [1])
    model.graph.initializer.append(one)
    model.graph.node.append(onnx.helper.make_node("Add", [f"{tensor}_right", "one_more"], [tensor]))
    onnx.save(model, wrong)
    manifest = Bundle.load(out, verify=False).manifest
    (out / MANIFEST_NAME).unlink()
    (out / f"{graph}.engine").write_text(str(wrong), encoding="utf-8")
    changed = replace(manifest, files=file_records(out))
    (out / MANIFEST_NAME).write_text(changed.to_json(), encoding="utf-8")
    return out

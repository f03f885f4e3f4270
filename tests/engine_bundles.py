"""Bundles as a TensorRT target writes them, made of ONNX bundles, for ``tests.device_of_memory``."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from msgspec.structs import asdict, replace

from export.directories import file_records
from export.forms import sliced
from export.graphs.trace import fix_capacity, slice_caches
from export.options import Options
from export.trt.plan import (
    backbone_capacity,
    backbone_profiles,
    cache_bytes,
    drafter_capacity,
    drafter_profiles,
    step_profiles,
)
from export.verify.host_kernels import HostKernels
from runtime.core.bundle import MANIFEST_NAME, TORCH, Bundle, EnginePlan, GraphSpec, TensorSpec
from runtime.device import cuda
from runtime.device.kernel_file import DIRECTORY_VARIABLE
from runtime.device.tensorrt import TensorRTLibrary
from tests.device_of_memory import FakeCudart, FakeDriver, FakeTensorRT

TARGET = "tensorrt-rtx"
# Graphs whose axis S is the capacity of the draft head's cache.
OF_THE_HEAD = ("drafter", "prepare", "expand")


def as_engine_bundle(
    source: Path,
    out: Path,
    *,
    max_num_seqs: int,
    max_context: int,
    prefill_chunk: int = 512,
    in_place: bool = False,
) -> Path:
    """Write the bundle ``out`` of a target with engines, and return it.

    source: a bundle of the target onnxruntime in float32, with the graphs of device steps
    max_num_seqs, max_context, prefill_chunk: as of ``EnginePlan``; a small chunk makes short prompts long
    in_place: whether passes read whole caches in place, and not a part of them
    Profiles and capacities are those that the exporter would choose.
    The ONNX files, whose paths are the plans, lie beside the bundle.
    """
    manifest = Bundle.load(source, verify=False).manifest
    # Of a head, the exporter's plan asks for nothing that the manifest does not say.
    head: Any = None
    if manifest.drafter is not None:
        trunk = SimpleNamespace(borrows_layers=manifest.drafter.has_streams)
        head = SimpleNamespace(**asdict(manifest.drafter), trunk_type=trunk)
    options = Options(max_batch=max_num_seqs, beam_width=head.beam_width if head else Options.beam_width)
    plan = EnginePlan(
        max_context=max_context,
        max_num_seqs=max_num_seqs,
        max_nodes=max(manifest.step_nodes[-1], 1),
        prefill_chunk=min(prefill_chunk, max_context),
        library="tensorrt_of_memory 0",
        capabilities=("sm89",),
    )
    of_backbone = backbone_capacity(plan, head)
    of_head = drafter_capacity(plan, head, options) if head else 0
    out.mkdir(parents=True)
    plans = out.with_name(f"{out.name}.plans")
    plans.mkdir()
    graphs = {}
    for name, contract in manifest.graphs.items():
        capacity = of_head if name in OF_THE_HEAD else of_backbone
        model = ir.load(source / f"{name}.onnx")
        if not in_place:
            slice_caches(model)
            contract = sliced(contract)
        fix_capacity(model, capacity)
        path = (plans / f"{name}.onnx").resolve()
        # ONNX Runtime reads the weights where they are said to be, and the loaded model names the old file.
        ir.save(model, path, external_data=f"{path.name}.data")
        (out / f"{name}.engine").write_text(str(path), encoding="utf-8")
        graphs[name] = with_capacity(contract, capacity)
    profiles = {name: step_profiles(plan, head, options, contract, name) for name, contract in graphs.items()}
    profiles["backbone"] = backbone_profiles(plan, head, graphs["backbone"])
    if head:
        profiles["drafter"] = drafter_profiles(plan, head, options, graphs["drafter"])
    memory = {
        name: {
            "weights": sum(path.stat().st_size for path in plans.glob(f"{name}.onnx*")),
            "cache": 0 if name == "commit" else cache_bytes(contract, max_num_seqs),
            "activations": 0,
        }
        for name, contract in graphs.items()
    }
    for record in manifest.files:
        if ".onnx" not in record:
            shutil.copy(source / record, out / record)
    changed = replace(
        manifest,
        target=TARGET,
        model=replace(manifest.model, max_position_embeddings=max_context),
        graphs=graphs,
        files=file_records(out),
        engine_plan=replace(plan, profiles=profiles, memory=memory),
    )
    (out / MANIFEST_NAME).write_text(changed.to_json(), encoding="utf-8")
    return out


def as_torch_bundle(source: Path, out: Path) -> Path:
    """Write the bundle ``out`` of the target torch, whose passes read a part of the caches, and return it.

    source: a bundle of the target onnxruntime in float32
    """
    manifest = Bundle.load(source, verify=False).manifest
    out.mkdir(parents=True)
    graphs = {}
    for name, contract in manifest.graphs.items():
        model = ir.load(source / f"{name}.onnx")
        slice_caches(model)
        ir.save(model, out / f"{name}.onnx", external_data=f"{name}.onnx.data")
        graphs[name] = sliced(contract)
    for record in manifest.files:
        if ".onnx" not in record:
            shutil.copy(source / record, out / record)
    changed = replace(manifest, target=TORCH, graphs=graphs, files=file_records(out))
    (out / MANIFEST_NAME).write_text(changed.to_json(), encoding="utf-8")
    return out


def with_capacity(contract: GraphSpec, capacity: int) -> GraphSpec:
    """The contract of a graph after ``fix_capacity``."""

    def fixed(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(t, shape=tuple(capacity if axis == "S" else axis for axis in t.shape)) for t in tensors
        )

    return GraphSpec(fixed(contract.inputs), fixed(contract.outputs))


def device_of_memory(
    monkeypatch: pytest.MonkeyPatch, *bundles: Path, kernels: HostKernels | None = None
) -> FakeCudart:
    """Make decoders of these bundles run on a stand-in for CUDA and TensorRT, which is returned.

    kernels: run in place of the step-logic graphs; without them the graphs do
    """
    cudart = FakeCudart()
    engines = {}
    for bundle in bundles:
        manifest = Bundle.load(bundle, verify=False).manifest
        assert manifest.engine_plan is not None
        for name, contract in manifest.graphs.items():
            path = Path((bundle / f"{name}.engine").read_text(encoding="utf-8"))
            engines[path] = contract, manifest.engine_plan.profiles[name]
    library = TensorRTLibrary(FakeTensorRT(cudart, engines=engines), None)
    monkeypatch.setattr("runtime.device.tensorrt.import_tensorrt", lambda target: library)
    monkeypatch.setattr(cuda, "load_cudart", lambda: cudart)
    monkeypatch.setenv(DIRECTORY_VARIABLE, "")
    driver = FakeDriver(cudart, kernels) if kernels else None
    monkeypatch.setattr("runtime.device.kernels.driver.load_driver", lambda: driver)
    return cudart

"""The targets ``tensorrt-rtx`` and ``tensorrt``: checked ONNX files are compiled, and checked on a GPU."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from export.errors import ExportError
from export.forms import GraphFile, WrittenGraph, graph_forms
from export.heads import step_sizes
from export.options import Options
from export.pipeline import CheckedGraphs, Progress, build_graphs
from export.quantisation.precision import ACTIVATIONS, QUANTIZED, Precision, WeightForm
from export.source import Source
from export.trt.compiler import (
    CompiledEngine,
    EngineCompiler,
    Library,
    check_capabilities,
    check_timing_cache,
    load_library,
)
from export.trt.plan import (
    backbone_capacity,
    backbone_profiles,
    cache_bytes,
    check_memory,
    describe,
    draft_plan,
    drafter_capacity,
    drafter_profiles,
    drafter_reads_in_place,
    step_profiles,
    target_model_reads_in_place,
)
from export.verify.runner import DevicePasses, GraphRunner
from runtime.core.bundle import EngineProfile
from runtime.core.errors import DeviceError
from runtime.device.cuda import CudaDevice, capability_of_gpu, load_cudart
from runtime.device.tensorrt import TensorRTEngine

# TensorRT fuses one scale for each column into the product; int4 needs blocks.
FORMS = {"int8": WeightForm("int8", None), "int4": WeightForm("int4", 32), "fp8": WeightForm("fp8", None)}


def build_tensorrt(
    target: str, source: Source, directory: Path, options: Options, progress: Progress
) -> CheckedGraphs:
    """Compile for the GPUs that the options name, or, with the target ``tensorrt``, for this machine's.

    The library, the GPUs and the shapes are checked first, before anything is computed. Raises ExportError.
    """
    library = load_library(target)
    backbone = _precision(options.precision, options)
    drafter = _precision(options.head_precision, options)
    activations = (backbone.activations, drafter.activations)
    halves = [name for name, dtype in ACTIVATIONS.items() if dtype in activations]
    used = {options.precision, options.head_precision, *halves}
    check_capabilities(library, options.gpus, tuple(sorted(used)))
    if options.timing_cache:
        check_timing_cache(options.timing_cache)
    plan = draft_plan(source.spec, options)
    progress(f"plan: {describe(plan)}")
    config = source.drafter.config if source.drafter else None
    model, attention = source.model.config, options.attention
    in_place = {
        "backbone": target_model_reads_in_place(model, backbone.activations, attention),
        "drafter": config and drafter_reads_in_place(config, drafter.activations, attention),
    }
    forms = graph_forms(
        source,
        options,
        backbone,
        drafter,
        backbone_capacity=backbone_capacity(plan, config),
        drafter_capacity=drafter_capacity(plan, config, options) if config else None,
        sliced=[name for name, reads_in_place in in_place.items() if not reads_in_place],
    )
    step_nodes = step_sizes(config, options, plan.max_nodes)
    cudart = load_cudart()
    reason = why_not_run(library, options.gpus, cudart)
    if reason:
        progress(f"the engines will be compiled and not run: {reason}")
    profiles: dict[str, tuple[EngineProfile, ...]] = {}
    engines: dict[str, Future[CompiledEngine]] = {}
    memory: dict[str, dict[str, int]] = {}
    validation = {}
    with EngineCompiler(library, capabilities=options.gpus, timing_cache=options.timing_cache) as compiler:

        def start(name: str, graph: WrittenGraph) -> None:
            engines[name] = compiler.submit(graph.path, graph.contract, profiles[name])

        def start_step_graph(graph: WrittenGraph) -> None:
            name = graph.path.stem
            profiles[name] = step_profiles(plan, config, options, graph.contract, name)
            start(name, graph)

        built = build_graphs(
            source,
            directory,
            options,
            forms,
            progress,
            step_nodes=step_nodes,
            on_step_graph=start_step_graph,
        )
        contract = built.graphs["backbone"].written.contract
        profiles["backbone"] = backbone_profiles(plan, config, contract)
        if config:
            name = options.family_of(config).graph
            contract = built.graphs[name].written.contract
            profiles[name] = drafter_profiles(plan, config, options, contract)
        for name, file in built.graphs.items():
            data = _data_file(file.written.path)
            # A step-logic graph has no such file.
            memory[name] = {"weights": data.stat().st_size if data.exists() else 0}
            # The commit graph works on the target model's caches.
            if name != "commit":
                memory[name]["cache"] = cache_bytes(file.written.contract, plan.max_num_seqs)
        plan = msgspec.structs.replace(
            plan, library=library.name, capabilities=options.gpus, profiles=profiles, memory=memory
        )
        progress(f"plan: {describe(plan)}")
        check_memory(memory, options.gpu_memory)
        progress(f"compiling for {', '.join(options.gpus) or 'this GPU'}")
        for name, file in built.graphs.items():
            # The graphs with weights wait until ONNX Runtime has let go of its copy of the weights.
            if name not in engines:
                start(name, file.written)
        for name, file in built.graphs.items():
            engine = engines.pop(name).result()
            memory[name] |= {"weights": engine.plan.nbytes, "activations": engine.activation_bytes}
            (directory / f"{name}.engine").write_bytes(engine.plan)
            file.written.path.unlink()
            _data_file(file.written.path).unlink(missing_ok=True)
    progress(f"compiled: {describe(plan)}")
    check_memory(memory, options.gpu_memory)
    # The engines run after all are compiled, because a compiler that measures kernels needs the whole GPU.
    for name, file in built.graphs.items() if not reason else ():
        progress(f"comparing {name}.engine with PyTorch")
        content = (directory / f"{name}.engine").read_bytes()
        validation[f"{name}.engine"] = check_engine(library, cudart, content, file, profiles[name])
    return dataclasses.replace(built, engine_plan=plan, differences=built.differences | validation)


def _data_file(path: Path) -> Path:
    """Where an ONNX file keeps its weights."""
    return path.with_name(f"{path.name}.data")


def _precision(name: str, options: Options) -> Precision:
    if name in QUANTIZED:
        # The features of a model in bfloat16 may be too large for float16.
        usual = "bf16" if "bf16" in (options.precision, options.head_precision) else "fp16"
        return Precision(ACTIVATIONS[options.activations or usual], FORMS[name])
    return Precision(ACTIVATIONS[name])


def why_not_run(library: Library, capabilities: tuple[str, ...], cudart: Any | None) -> str | None:
    """The reason that engines cannot be run on this machine; None if they can."""
    if cudart is None:
        return "cuda-bindings is not installed"
    gpu = capability_of_gpu(cudart)
    if gpu is None:
        return "this machine has no GPU"
    if library.compiles_ahead and gpu not in capabilities:
        return f"they were compiled for {', '.join(capabilities)}, and this machine's GPU is {gpu}"
    return None


def check_engine(
    library: Library, cudart: Any, plan: bytes, file: GraphFile, profiles: tuple[EngineProfile, ...]
) -> dict[str, float]:
    """The differences of an engine from PyTorch, by the check that its ONNX file has passed.

    Raises ExportError if they are too large or the engine cannot be run.
    """
    contract = file.written.contract
    try:
        device = CudaDevice(cudart)
        try:
            name = file.written.path.stem
            engine = TensorRTEngine(library.trt, library.log, device, plan, contract, profiles, name=name)
            passes = DevicePasses(device, engine, contract)
            return file.check(GraphRunner(passes, contract, file.written.precision))
        finally:
            device.close()
    except DeviceError as error:
        raise ExportError(str(error)) from error

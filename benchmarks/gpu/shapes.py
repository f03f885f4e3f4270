"""Passes of a step in the shape of a large model, timed alone: a stage of ``benchmarks.gpu.quick``.

Target model and commit are graphs of a random Llama, and a layer with its LM head over the frames stands in
for the draft head. All other stages are the bundle's own, on a GPU our kernels. They do not depend on the
width of a model.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.job import device_facts
from benchmarks.gpu.parts import Skip
from benchmarks.gpu.random_llama import LARGE, SMALL, Shape, commit, target_model
from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.errors import DeviceMemoryError, UserError
from runtime.device.device import DeviceArray, DeviceEngine, MakeEngine, write_array
from runtime.device.pytorch.device import TorchDevice
from runtime.device.pytorch.engine import TorchEngine
from runtime.load.device import open_device

BATCHES, CONTEXTS = (1, 4, 16), (512, 2048, 4096, 8192, 16384)
SMALL_BATCHES, SMALL_CONTEXTS = (1, 2), (32, 64)
# Replays of a pass that are timed together.
REPLAYS = 20
# Positions of a cache behind the context.
ROOM = 128


class Writer(Protocol):
    def write(self, **values: Any) -> None: ...


def measure(args: argparse.Namespace, results: Writer) -> None:
    """Time all passes by batch, context and nodes; what has been found is written after every row."""
    bundle = Bundle.load(args.bundle, verify=False)
    spec = bundle.manifest.drafter
    if spec is None or len(bundle.manifest.step_nodes) < 2:
        raise UserError("--bundle: needs a draft head and graphs of steps with nodes")
    end = time.monotonic() + 60 * args.minutes
    device, make = open_device(bundle, args.device, args.threads)
    try:
        if not isinstance(device, TorchDevice):
            raise UserError(f"--bundle: expected one of the target torch, got {bundle.manifest.target}")
        shape = replace(SMALL, dtype="float32") if args.small else LARGE
        facts = device_facts(args.device, None)
        results.write(shape=vars(shape), device=vars(facts), weight_bytes=shape.weight_bytes)
        passes = _Passes(device, shape, bundle, make)
        rows: list[dict[str, Any]] = []
        for context in SMALL_CONTEXTS if args.small else CONTEXTS:
            for batch in SMALL_BATCHES if args.small else BATCHES:
                for nodes in bundle.manifest.step_nodes:
                    if time.monotonic() > end:
                        raise Skip(f"the time was over after {len(rows)} rows")
                    rows.append({"batch": batch, "context": context, "nodes": nodes})
                    rows[-1] |= _row(passes, batch, context, nodes, facts.bandwidth)
                    results.write(rows=rows)
    finally:
        device.close()


def _row(passes: "_Passes", batch: int, context: int, nodes: int, bandwidth: float | None) -> dict[str, Any]:
    try:
        times = passes.milliseconds(batch, context, nodes)
    except DeviceMemoryError as error:
        return {"skipped": str(error)}
    shape = passes.shape
    size = shape.weight_bytes + batch * context * shape.cache_bytes
    speed = size / (times["verify"] / 1e3) if times["verify"] else None
    return {
        "ms": times,
        "step_ms": sum(times.values()),
        "verify_bytes": size,
        "share_of_bandwidth": speed / bandwidth if speed and bandwidth else None,
    }


class _Passes:
    """The engines of a step, and the memory that their passes share."""

    def __init__(self, device: TorchDevice, shape: Shape, bundle: Bundle, make_own: MakeEngine):
        """make_own: makes engines of the bundle's graphs"""
        self.shape, self._device = shape, device
        spec = bundle.manifest.drafter
        assert spec is not None
        self._frames = spec.num_frames
        (self._path,) = {t.shape[1] for t in bundle.manifest.graphs["accept"].outputs if t.name == "path"}
        assert isinstance(self._path, int)
        self._engines: dict[str, tuple[DeviceEngine, GraphSpec]] = {}
        place, dtype = torch.device(device.name), getattr(torch, shape.dtype)

        def make(sizes: tuple[int, ...]) -> Tensor:
            return torch.randn(sizes, device=place, dtype=dtype) * 0.02

        for name, (graph, contract) in {
            "verify": target_model(shape, make),
            "draft": target_model(replace(shape, layers=1), make),
            "commit": commit(shape, self._path),
        }.items():
            self._engines[name] = TorchEngine(device, graph, contract, name=name), contract
        for name in ("prepare", "accept", *(f"search_{count}" for count in bundle.manifest.step_nodes)):
            self._engines[name] = make_own(name), bundle.manifest.graphs[name]
        # By name and tensor, each as large as its largest use so far.
        self._memory: dict[tuple[str, str], DeviceArray] = {}

    def milliseconds(self, batch: int, context: int, nodes: int) -> dict[str, float]:
        """The time of every stage of a step; of a plain one for 0 nodes."""
        sizes = {"B": batch, "S": context + ROOM, "R": context + ROOM, "N": nodes + 1}
        search, accept = (self._time(name, sizes, context) for name in (f"search_{nodes}", "accept"))
        times = {"search": search, "verify": self._time("verify", sizes, context), "accept": accept}
        if not nodes:
            return times
        frames = {**sizes, "N": self._frames}
        times["draft"] = self._time("prepare", sizes, context) + self._time("draft", frames, context)
        return {**times, "commit": self._time("commit", sizes, context)}

    def _time(self, name: str, sizes: Mapping[str, int], context: int) -> float:
        """Milliseconds of a pass, as the mean of replays in a row."""
        engine, contract = self._engines[name]
        arrays = {tensor.name: self._array(name, tensor, sizes) for tensor in contract.inputs}
        for tensor in contract.outputs:
            past = arrays.get(tensor.name.replace("present_", "past_"))
            arrays[tensor.name] = past or self._array(name, tensor, sizes)
        if "attn_mask" in arrays and name in ("verify", "draft"):
            mask = np.arange(sizes["S"]) < context
            write_array(self._device, arrays["attn_mask"], np.broadcast_to(mask, arrays["attn_mask"].shape))
            write_array(self._device, arrays["write_index"], np.full(sizes["B"], context))
        launch = engine.bind(arrays)
        launch()
        self._device.synchronize()
        return self._of_replays(self._device.capture(launch))

    def _of_replays(self, launch: Callable[[], None]) -> float:
        launch()
        begin = self._device.mark()
        for _ in range(REPLAYS):
            launch()
        end = self._device.mark()
        self._device.synchronize()
        return self._device.milliseconds(begin, end) / REPLAYS

    def _array(self, name: str, tensor: Any, sizes: Mapping[str, int]) -> DeviceArray:
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
        # The target model, the stand-in for the head and the commit share the caches, which are large.
        key = ("" if tensor.name.startswith("past_") else name, tensor.name)
        wanted = DeviceArray(0, shape, tensor.dtype)
        if key not in self._memory or self._memory[key].nbytes < wanted.nbytes:
            self._memory[key] = self._device.allocate(shape, tensor.dtype)
        return self._memory[key].view(shape)

"""A graph as a ``DeviceEngine`` of PyTorch: for every shape of a pass a list of calls of torch functions."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.errors import BundleError, DeviceError
from runtime.device.device import Device, DeviceArray, DeviceEngine, Launch, MakeEngine
from runtime.device.pytorch.device import TYPES, TorchDevice, open_torch_device
from runtime.device.pytorch.graph import Function, Graph, Inputs, Node, read_graph
from runtime.device.pytorch.layers import pack_products
from runtime.device.pytorch.operators import OPERATORS
from runtime.engines.ort import SUFFIX

# Values of a constant that stays on the host too.
MAX_SHAPE_VALUES = 4096
# Shapes of passes that are kept for ``run``: of prompts, by the tokens of a part and the length in use.
KEPT_SHAPES = 64


@dataclass(frozen=True)
class _Call:
    """A function of torch. arguments, results: places of values, None for an input that is left out;
    done: places of values that nothing reads afterwards."""

    function: Function
    arguments: tuple[int | None, ...]
    results: tuple[int, ...]
    done: tuple[int, ...] = ()


@dataclass
class _Value:
    """A value of the graph while its calls are made.

    tensor: on the meta device, which has shapes and types and no values
    host: the value itself, if it is known before a pass
    stored: a constant of the graph in the device's memory
    place: where a pass keeps it; None until a call needs it
    """

    tensor: Tensor
    host: Tensor | None = None
    stored: Tensor | None = None
    place: int | None = None


@dataclass
class _Calls:
    """The calls of a pass in fixed shapes, for arrays at any address.

    values: what a pass begins with: constants at their places, None at all others
    inputs: places of the graph's inputs by name
    outputs: places of the outputs that are to be copied to their arrays, by name
    """

    values: list[Any] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)

    def new_place(self, value: Tensor | None = None) -> int:
        self.values.append(value)
        return len(self.values) - 1


class TorchEngine:
    """Runs a graph operator by operator, on the tensors at the addresses that it is given.

    The calls of a pass are made once for each combination of shapes. Whatever follows from shapes and
    constants is computed then, and not in passes. That no call waits for a value of the device is checked
    at the same time, because the calls run on tensors without values first.
    """

    def __init__(self, device: TorchDevice, graph: Graph, contract: GraphSpec, *, name: str):
        """Raises DeviceError for an operator that ``OPERATORS`` lacks."""
        self._device, self._contract, self._name = device, contract, name
        graph, packed = pack_products(graph, device)
        missing = sorted({node.operator for node in graph.nodes} - OPERATORS.keys() - {"Shape", "Size"})
        if missing:
            raise DeviceError(f"{name}: the target torch has no operators {', '.join(missing)}")
        self._outputs = [tensor.name for tensor in contract.outputs]
        self._nodes, constants = self._with_constants_computed(graph)
        used = {given for node in self._nodes for given in node.inputs} | {*self._outputs}
        constants = {key: value for key, value in constants.items() if key in used}
        # Of small constants, which may decide over shapes, the values on the host; all on the device.
        self._small = {key: value for key, value in constants.items() if value.numel() <= MAX_SHAPE_VALUES}
        self._stored = {key: device.put(value) for key, value in constants.items()} | packed
        self._calls: OrderedDict[tuple[tuple[int, ...], ...], _Calls] = OrderedDict()

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        """Raises DeviceError for shapes that the graph does not take, and ValueError for caches whose
        output has another address than their input."""
        tensors = self._tensors(arrays)
        return partial(self._device.put_work, partial(self._pass, self._calls_of(arrays), tensors))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        tensors = self._tensors(arrays)
        key = tuple(arrays[tensor.name].shape for tensor in self._contract.inputs)
        calls = self._calls.pop(key, None) or self._calls_of(arrays)
        self._calls[key] = calls
        while len(self._calls) > KEPT_SHAPES:
            self._calls.popitem(last=False)
        self._device.put_work(partial(self._pass, calls, tensors))

    def _tensors(self, arrays: Mapping[str, DeviceArray]) -> dict[str, Tensor]:
        contract = self._contract
        for tensor in contract.outputs:
            past = arrays.get(tensor.name.replace("present_", "past_"))
            if past and past.address != arrays[tensor.name].address:
                raise ValueError(f"{self._name}: {tensor.name} must have the address of its input")
        return {
            tensor.name: self._device.tensor(arrays[tensor.name])
            for tensor in (*contract.inputs, *contract.outputs)
        }

    @staticmethod
    def _pass(calls: _Calls, tensors: Mapping[str, Tensor]) -> None:
        values = calls.values.copy()
        for name, place in calls.inputs.items():
            values[place] = tensors[name]
        for call in calls.calls:
            found = call.function(*[None if each is None else values[each] for each in call.arguments])
            if isinstance(found, Tensor):
                values[call.results[0]] = found
            else:
                for place, value in zip(call.results, found, strict=True):
                    values[place] = value
            for place in call.done:
                values[place] = None
        for name, place in calls.outputs.items():
            tensors[name].copy_(values[place])

    def _with_constants_computed(self, graph: Graph) -> tuple[list[Node], dict[str, Tensor]]:
        """The nodes that depend on an input, and all constants, with those of the other nodes' results."""
        nodes, constants = [], dict(graph.constants)
        for node in graph.nodes:
            known = all(name in constants for name in node.inputs if name)
            if not known:
                nodes.append(node)
                continue
            values = [constants[name] if name else None for name in node.inputs]
            constants |= self._computed(node, values)
        return nodes, constants

    def _computed(self, node: Node, values: list[Tensor | None]) -> dict[str, Tensor]:
        """The results of a node whose inputs are known, on the host."""
        if node.operator in ("Shape", "Size"):
            assert values[0] is not None
            return {node.outputs[0]: _shape(node, values[0])}
        function, fixed = self._function(node, values, values)
        found = function(*[value for index, value in enumerate(values) if index not in fixed])
        return dict(zip(node.outputs, [found] if isinstance(found, Tensor) else found, strict=True))

    def _function(
        self, node: Node, tensors: list[Tensor | None], values: list[Tensor | None]
    ) -> tuple[Function, tuple[int, ...]]:
        """The function of a node, and the places of its inputs that the function does not take.

        tensors: all inputs, with or without values; values: those that are known
        """
        operator = OPERATORS[node.operator]
        for index in operator.fixed:
            if index < len(tensors) and tensors[index] is not None and values[index] is None:
                raise DeviceError(
                    f"{self._name}: {node.operator} {node.name!r} reads {node.inputs[index]!r}, which "
                    "decides over a shape and is known on the device only"
                )
        known = {index: value for index, value in enumerate(values) if value is not None}
        try:
            return operator.make(Inputs(node, tensors, known)), operator.fixed
        except ValueError as error:
            raise DeviceError(f"{self._name}: the target torch cannot run {error}") from error

    def _calls_of(self, arrays: Mapping[str, DeviceArray]) -> _Calls:
        """Make the calls of a pass in the shapes of these arrays."""
        made = _Calls()
        values = {
            name: _Value(_like(tensor), self._small.get(name), tensor)
            for name, tensor in self._stored.items()
        }
        for tensor in self._contract.inputs:
            array = arrays[tensor.name]
            place = made.inputs[tensor.name] = made.new_place()
            empty = torch.empty(array.shape, dtype=TYPES[array.dtype], device="meta")
            values[tensor.name] = _Value(empty, place=place)
        stale: set[str] = set()
        for node in self._nodes:
            # A cache is updated in place, and a graph means the cache as it was.
            if stale.intersection(node.inputs):
                names = ", ".join(stale.intersection(node.inputs))
                raise DeviceError(f"{self._name}: {names} is read after it was updated in place")
            try:
                self._add(made, values, node)
            except DeviceError:
                raise
            except Exception as error:
                shapes = {name: tuple(values[name].tensor.shape) for name in node.inputs if name}
                raise DeviceError(
                    f"{self._name}: {node.operator} {node.name!r} does not take {shapes}: {error}"
                ) from error
            if node.operator == "TensorScatter":
                memory = _memory(values[node.inputs[0]].tensor)
                stale |= {name for name, each in values.items() if _memory(each.tensor) == memory}
                stale -= {*node.outputs}
        for tensor in self._contract.outputs:
            value = values[tensor.name]
            expected = arrays[tensor.name]
            if tuple(value.tensor.shape) != expected.shape:
                raise DeviceError(
                    f"{self._name}: {tensor.name} has the shape {tuple(value.tensor.shape)} for these "
                    f"inputs, got an array of {expected.shape}"
                )
            if not tensor.name.startswith("present_"):
                made.outputs[tensor.name] = self._place(made, value)
        self._end_values(made)
        return made

    def _add(self, made: _Calls, values: dict[str, _Value], node: Node) -> None:
        """Add the call of a node, or compute its results where they are known."""
        given = [values[name] if name else None for name in node.inputs]
        tensors = [each.tensor if each else None for each in given]
        if node.operator in ("Shape", "Size"):
            assert tensors[0] is not None
            found = _shape(node, tensors[0])
            values[node.outputs[0]] = _Value(_like(found), found)
            return
        known = [each.host if each else None for each in given]
        if all(each is None or each.host is not None for each in given):
            for name, result in self._computed(node, known).items():
                values[name] = _Value(_like(result), result)
            return
        function, fixed = self._function(node, tensors, known)
        kept = [index for index in range(len(given)) if index not in fixed]
        results = function(*[tensors[index] for index in kept])
        named = list(zip(node.outputs, [results] if isinstance(results, Tensor) else results, strict=True))
        if not any(result.numel() for _, result in named):
            # Nothing is computed for axes of size 0.
            for name, result in named:
                values[name] = _Value(_like(result), torch.empty(result.shape, dtype=result.dtype))
            return
        places = []
        for name, result in named:
            places.append(made.new_place())
            values[name] = _Value(result, place=places[-1])
        read = [given[index] for index in kept]
        arguments = tuple(None if each is None else self._place(made, each) for each in read)
        made.calls.append(_Call(function, arguments, tuple(places)))

    def _place(self, made: _Calls, value: _Value) -> int:
        """Where passes find a value; a constant is put there."""
        if value.place is None:
            if value.stored is None:
                assert value.host is not None
                value.stored = self._device.put(value.host)
            value.place = made.new_place(value.stored)
        return value.place

    @staticmethod
    def _end_values(made: _Calls) -> None:
        """Note after which call a value can be dropped, so that its memory is used again."""
        last = {}
        for index, call in enumerate(made.calls):
            for place in (*call.arguments, *call.results):
                last[place] = index
        kept = {*made.outputs.values()}
        ends: dict[int, list[int]] = {}
        for place, index in last.items():
            if place is not None and place not in kept:
                ends.setdefault(index, []).append(place)
        for index, places in ends.items():
            made.calls[index] = replace(made.calls[index], done=tuple(places))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _memory(tensor: Tensor) -> int:
    """What tells the memory of a tensor without values from that of others."""
    return tensor.untyped_storage()._cdata


def _shape(node: Node, tensor: Tensor) -> Tensor:
    if node.operator == "Size":
        return torch.tensor(tensor.numel())
    start, end = node.attributes.get("start", 0), node.attributes.get("end", None)
    return torch.tensor(list(tensor.shape)[start:end], dtype=torch.int64)


def open_torch(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, MakeEngine]:
    """Open a GPU or the CPU for a bundle's ONNX files. As ``runtime.device.device.OpenDevice``."""
    opened = open_torch_device(device, num_threads)

    def make(name: str) -> DeviceEngine:
        path = bundle.path / f"{name}{SUFFIX}"
        try:
            graph = read_graph(path)
        except (OSError, ValueError) as error:
            raise BundleError(f"the target torch cannot load {path.name}: {error}") from error
        return TorchEngine(opened, graph, bundle.manifest.graphs[name], name=name)

    return opened, make

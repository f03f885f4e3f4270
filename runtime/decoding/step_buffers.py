"""The named arrays that the graphs of a device step share.

A tensor has the same array in every graph that names it, so that what one graph writes the next one reads.
The draft head has a mask, positions and a cache of its own, which are named after it.
"""

from collections.abc import Iterator, Mapping, Sequence

from runtime.bundle import GraphSpec
from runtime.engines.device import Device, DeviceArray

# Arrays of other names than the graphs' tensors, by graph.
RENAMED: dict[str, dict[str, str]] = {
    "backbone": {"write_index": "lengths"},
    "drafter": {"features": "path_features"},
}
# Tensors that the draft head's graphs do not share with the target model's.
OF_THE_HEAD = ("attn_mask", "write_index", "positions", "past_")


class StepBuffers:
    """Arrays by name, each as large as its largest use.

    contracts: by graph
    uses: sizes of the open axes in every kind of pass; the capacity of the target model's cache is S, that of
        the head's ``drafter_S``
    """

    def __init__(self, device: Device, contracts: Mapping[str, GraphSpec], uses: Sequence[Mapping[str, int]]):
        self._contracts = contracts
        self._capacities = {name: size for name, size in uses[0].items() if name.endswith("S")}
        largest: dict[str, DeviceArray] = {}
        for sizes in uses:
            for graph, contract in contracts.items():
                for name, array in _arrays(graph, contract, sizes):
                    if name not in largest or array.nbytes > largest[name].nbytes:
                        largest[name] = array
        self.arrays = {name: device.allocate(each.shape, each.dtype) for name, each in largest.items()}

    def of_pass(self, graph: str, *, slot: int = 0, **axes: int) -> dict[str, DeviceArray]:
        """The arrays of a graph's tensors by name, for a pass of these sizes.

        slot: the first whose caches the pass works on
        """
        contract = self._contracts[graph]
        result = {}
        wanted = _arrays(graph, contract, {**self._capacities, **axes})
        for tensor, (name, array) in zip((*contract.inputs, *contract.outputs), wanted, strict=True):
            found, shape = self.arrays[name], array.shape
            is_cache = "past_" in name
            result[tensor.name] = found.rows(slot, slot + shape[0]) if is_cache else found.view(shape)
        return result

    def caches(self) -> list[DeviceArray]:
        """The keys and values of all layers, [B, KH, S, D] each."""
        return [array for name, array in self.arrays.items() if "past_" in name]


def _arrays(graph: str, contract: GraphSpec, sizes: Mapping[str, int]) -> Iterator[tuple[str, DeviceArray]]:
    """The name and the shape, without memory, of every tensor's array."""
    of_head = graph in ("drafter", "prepare")

    def size(axis: int | str) -> int:
        return axis if isinstance(axis, int) else sizes["drafter_S" if axis == "S" and of_head else axis]

    for tensor in (*contract.inputs, *contract.outputs):
        shape = tuple(size(axis) for axis in tensor.shape)
        yield _array_name(graph, tensor.name, of_head), DeviceArray(0, shape, tensor.dtype)


def _array_name(graph: str, tensor: str, of_head: bool) -> str:
    # A cache is updated in place.
    name = tensor.replace("present_", "past_")
    if name in RENAMED.get(graph, {}):
        return RENAMED[graph][name]
    return f"drafter_{name}" if of_head and name.startswith(OF_THE_HEAD) else name

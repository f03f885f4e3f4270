"""The named arrays that the graphs of a device step share.

A tensor has the same array in every pass that calls it by one name, so that what one graph writes the next
one reads. The draft head has a mask, positions and a cache of its own, which are named after it.
"""

from collections.abc import Iterable, Iterator, Mapping

from runtime.core.bundle import GraphSpec
from runtime.device.device import Device, DeviceArray
from runtime.device.step_plan import GraphPass

# Graphs of the draft head, and the tensors that they do not share with the target model's.
OF_THE_HEAD = ("drafter", "prepare", "expand")
OWN_TENSORS = ("attn_mask", "write_index", "position", "past_")


class StepBuffers:
    """Arrays by name, each as large as its largest use.

    contracts: by graph
    capacities: positions of the target model's cache as S, and of the head's as ``drafter_S``
    step: passes of steps, of at most ``max_num_seqs`` sequences
    prompt: passes over the largest part of a prompt, of one sequence
    """

    def __init__(
        self,
        device: Device,
        contracts: Mapping[str, GraphSpec],
        *,
        capacities: Mapping[str, int],
        max_num_seqs: int,
        step: Iterable[GraphPass],
        prompt: Iterable[GraphPass],
    ):
        self._contracts = contracts
        self._capacities = capacities
        largest: dict[str, DeviceArray] = {}
        uses = [(each, max_num_seqs) for each in step] + [(each, 1) for each in prompt]
        for each, count in uses:
            for name, array in self._named_arrays(each, count):
                if name not in largest or array.nbytes > largest[name].nbytes:
                    largest[name] = array
        self.arrays = {name: device.allocate(each.shape, each.dtype) for name, each in largest.items()}

    def of_pass(self, graph_pass: GraphPass, count: int, *, slot: int = 0) -> dict[str, DeviceArray]:
        """The arrays of a pass of ``count`` sequences by tensor, with the caches from ``slot`` on."""
        contract = self._contracts[graph_pass.graph]
        tensors = (*contract.inputs, *contract.outputs)
        result = {}
        for tensor, (name, wanted) in zip(tensors, self._named_arrays(graph_pass, count), strict=True):
            array, is_cache = self.arrays[name], "past_" in name
            result[tensor.name] = (
                array.rows(slot, slot + wanted.shape[0]) if is_cache else array.view(wanted.shape)
            )
        return result

    def caches(self) -> list[DeviceArray]:
        """The keys and values of all layers, [B, KH, S, D] each."""
        return [array for name, array in self.arrays.items() if "past_" in name]

    def _named_arrays(self, graph_pass: GraphPass, count: int) -> Iterator[tuple[str, DeviceArray]]:
        """The name and the shape, without memory, of the array of every tensor."""
        of_head = graph_pass.graph in OF_THE_HEAD
        capacity = self._capacities["drafter_S" if of_head else "S"]
        sizes = {**graph_pass.axes, "S": capacity, "B": count}
        contract = self._contracts[graph_pass.graph]
        for tensor in (*contract.inputs, *contract.outputs):
            # A cache is updated in place.
            name = tensor.name.replace("present_", "past_")
            if name in graph_pass.names:
                name = graph_pass.names[name]
            elif of_head and name.startswith(OWN_TENSORS):
                name = f"drafter_{name}"
            shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
            yield name, DeviceArray(0, shape, tensor.dtype)

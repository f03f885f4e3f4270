"""The named arrays that the graphs of a device step share.

A tensor has the same array in every graph that names it, so that what one graph writes the next one reads.
The draft head has a mask, positions and a cache of its own, which are named after it.
"""

from collections.abc import Iterator, Mapping

from runtime.bundle import GraphSpec
from runtime.engines.device import Device, DeviceArray

# What tensors of a step are by another name, by graph. A prompt's passes have arrays of their own for them.
RENAMED: dict[str, dict[str, str]] = {
    "backbone": {"write_index": "lengths"},
    "drafter": {"features": "path_features"},
}
# Graphs that also read prompts.
OF_PROMPTS = ("backbone", "drafter")
# Graphs of the draft head, and the tensors that they do not share with the target model's.
OF_THE_HEAD = ("drafter", "prepare")
OWN_TENSORS = ("attn_mask", "write_index", "positions", "past_")


class StepBuffers:
    """Arrays by name, each as large as its largest use.

    contracts: by graph
    step, prompt: sizes of the open axes in the largest step, and in the pass over the largest part of a
        prompt; the capacity of the target model's cache is S, that of the head's ``drafter_S``
    """

    def __init__(
        self,
        device: Device,
        contracts: Mapping[str, GraphSpec],
        *,
        step: Mapping[str, int],
        prompt: Mapping[str, int],
    ):
        self._contracts = contracts
        self._capacities = {name: size for name, size in step.items() if name.endswith("S")}
        largest: dict[str, DeviceArray] = {}
        for graph in contracts:
            uses = [*self._named_arrays(graph, step, of_prompt=False)]
            if graph in OF_PROMPTS:
                uses += self._named_arrays(graph, prompt, of_prompt=True)
            for name, array in uses:
                if name not in largest or array.nbytes > largest[name].nbytes:
                    largest[name] = array
        self.arrays = {name: device.allocate(each.shape, each.dtype) for name, each in largest.items()}

    def of_step(self, graph: str, **axes: int) -> dict[str, DeviceArray]:
        """The arrays of a graph's tensors by name, for a step of these sizes."""
        return self._of_pass(graph, axes, slot=0, of_prompt=False)

    def of_prompt(self, graph: str, slot: int, **axes: int) -> dict[str, DeviceArray]:
        """The same for a pass over a prompt, with the caches of a slot."""
        return self._of_pass(graph, axes, slot=slot, of_prompt=True)

    def caches(self) -> list[DeviceArray]:
        """The keys and values of all layers, [B, KH, S, D] each."""
        return [array for name, array in self.arrays.items() if "past_" in name]

    def _of_pass(
        self, graph: str, axes: Mapping[str, int], *, slot: int, of_prompt: bool
    ) -> dict[str, DeviceArray]:
        contract = self._contracts[graph]
        tensors = (*contract.inputs, *contract.outputs)
        result = {}
        named = self._named_arrays(graph, axes, of_prompt=of_prompt)
        for tensor, (name, wanted) in zip(tensors, named, strict=True):
            array, is_cache = self.arrays[name], "past_" in name
            result[tensor.name] = (
                array.rows(slot, slot + wanted.shape[0]) if is_cache else array.view(wanted.shape)
            )
        return result

    def _named_arrays(
        self, graph: str, axes: Mapping[str, int], *, of_prompt: bool
    ) -> Iterator[tuple[str, DeviceArray]]:
        """The name and the shape, without memory, of the array of every tensor."""
        of_head = graph in OF_THE_HEAD
        sizes = {**self._capacities, **axes}
        if of_head:
            sizes["S"] = sizes["drafter_S"]
        contract = self._contracts[graph]
        for tensor in (*contract.inputs, *contract.outputs):
            # A cache is updated in place.
            name = tensor.name.replace("present_", "past_")
            if not of_prompt and name in RENAMED.get(graph, {}):
                name = RENAMED[graph][name]
            elif of_head and name.startswith(OWN_TENSORS):
                name = f"drafter_{name}"
            shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
            yield name, DeviceArray(0, shape, tensor.dtype)

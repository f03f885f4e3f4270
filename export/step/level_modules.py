"""The torch modules of the weightless graphs of autoregressive heads (``export.step.contracts``)."""

import torch
from torch import Tensor, nn

from drafters.layers import pick
from export.step.levels import Level, frontier_of, tree_of_levels
from export.step.modules import search_outputs, tree_mask
from runtime.core.bundle import DrafterSpec, GraphSpec


class PrepareRootGraph(nn.Module):
    """The positions and the mask of the root's pass over P tokens of context, of which the last is queried.

    Behind the new tokens the pass writes padding into the cache; the levels' passes overwrite it, or nothing
    attends to it.
    length: P
    """

    def __init__(self, contract: GraphSpec, length: int):
        super().__init__()
        self.outputs = [tensor.name for tensor in contract.outputs]
        self.length = length

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        counts = inputs["counts"].unsqueeze(1)
        found = {"query_indices": counts - 1}
        if "lengths" in inputs:
            lengths = inputs["lengths"].unsqueeze(1)
            starts = lengths - counts
            positions = inputs["positions"]
            found["context_position_ids"] = starts + torch.arange(self.length)
            found["attn_mask"] = (positions < lengths).view(-1, 1, 1, positions.shape[0])
            found["write_index"] = starts.squeeze(1)
        return tuple(found[name] for name in self.outputs)


class ExpandGraph(nn.Module):
    """From the children of one pass to the inputs of the next."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.width = spec.beam_width
        self.places = spec.beam_width * (spec.num_frames - 1)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        frontier = frontier_of(
            inputs["child_tokens"], inputs["child_logprobs"], inputs["frontier_scores"], width=self.width
        )
        if "paths" in inputs:
            paths = torch.cat(
                (pick(inputs["paths"], frontier.parents), frontier.tokens.unsqueeze(-1)), dim=-1
            )
            return frontier.scores, frontier.chosen, paths
        # The levels' nodes follow the context in the cache, M places for each level.
        lengths, first = inputs["lengths"], (inputs["depth"] - 1) * self.width
        own = (first + torch.arange(self.width)).unsqueeze(-1) == torch.arange(self.places)
        reach = pick(inputs["reach"], frontier.parents) + own.long()
        return (
            frontier.scores,
            frontier.chosen,
            pick(inputs["node_features"], frontier.parents),
            frontier.tokens,
            # The root stands at the last context position.
            (lengths - 1 + inputs["depth"]).unsqueeze(1).expand(-1, self.width),
            tree_mask(reach, lengths, inputs["positions"]),
            lengths + first,
            reach,
        )


class LevelSearchGraph(nn.Module):
    """From the children of all passes to a tree, and the inputs of the target model's pass over it."""

    def __init__(self, num_nodes: int):
        super().__init__()
        self.num_nodes = num_nodes

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        levels: list[Level] = []
        while f"child_tokens_{len(levels)}" in inputs:
            names = (f"{name}_{len(levels)}" for name in LEVEL_TENSORS)
            tokens, log_probs, *of_frontier = (inputs[name] for name in names if name in inputs)
            levels.append(Level(tokens, log_probs, *of_frontier))
        tree = tree_of_levels(levels, inputs["anchor_ids"], num_nodes=self.num_nodes)
        return search_outputs(tree, inputs["lengths"], inputs["positions"])


LEVEL_TENSORS = ("child_tokens", "child_logprobs", "frontier_scores", "chosen")

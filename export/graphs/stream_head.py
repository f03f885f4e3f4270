"""Speculative streams in a pass of their own, which takes the place of a draft head's.

The pass that verifies hands on the main stream at layer N - N_s, as the features of a head. Here it goes
through the upper layers again, beside the streams of the last token alone, and this graph has a cache of
these layers' keys and values of its own. That is N_s more layers for every accepted token, and T rows in
place of T for every node of a tree.
"""

import torch
from torch import Tensor

from drafters.lattice import lattice_tensors
from drafters.parallel import last_context
from export.graphs.operators import ScatterCache
from export.graphs.stream_graph import StreamGraph
from export.graphs.windows import layer_masks


class StreamHeadGraph(StreamGraph):
    """The pass of a parallel drafter (``drafters.parallel``) whose frames are streams."""

    def run_pass(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        head, start, main = self.head, inputs["write_index"], inputs["features"]
        context, following = inputs["context_position_ids"], inputs["frame_position_ids"]
        count, frames = main.shape[1], following.shape[1]
        last = last_context(main, context, following[:, :1])
        numbers = torch.arange(1, frames + 1, device=main.device)
        # A slice would be shorter, but TensorRT for RTX 1.7 cannot tell that it has as many rows as the mask.
        streams = head.start_streams(last)[:, 0].index_select(1, numbers - 1)
        positions = torch.cat((context, following), dim=1)

        # In the cache the streams follow the new tokens. A row sees what was written before it and itself;
        # of padding between tokens and streams, the mask of the streams shows nothing.
        own = start.unsqueeze(1) + torch.arange(count + frames, device=main.device)  # [B, A + T]
        columns = torch.arange(past[0].shape[2], device=main.device)
        earlier = columns <= own.unsqueeze(-1)
        mask = torch.cat((earlier[:, :count], inputs["attn_mask"][:, 0] & earlier[:, count:]), dim=1)
        masks = layer_masks(
            self.model.config,
            mask.unsqueeze(1),
            positions=positions,
            written=positions,
            write_index=start,
            context=self.context,
        )
        cache = ScatterCache(past, start, first_layer=head.config.base_num_layers - head.config.num_layers)
        hidden = head.run_streams(main, streams, positions, numbers, masks, cache)[1]

        anchors = inputs["anchor_ids"].squeeze(1) if "anchor_ids" in inputs else None
        hidden = head.fuse(hidden, anchors)
        lattice = lattice_tensors(head, hidden, anchors, width=self.width)
        return *lattice.present().values(), *cache.present

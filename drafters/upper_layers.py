"""The upper decoder layers of a target model, which main rows and stream rows pass together.

The layers are Hugging Face's own modules. Copies of the containers share every module with weights with the
target model, so they need no memory. In a copy, ``peft`` gives the projections LoRA adapters (Hu et al.,
arXiv 2106.09685): W x + B A x, where B starts at zero. A row is a token's or a stream's hidden state:

    hidden          [B, N, H]  float  the residual stream before the layers
    position_ids    [B, N]     int64
    stream_numbers  [N]        int64  0 for a row of the main stream, j for one of stream j
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.target_models import layer_types, sliding_window

ADAPTER = "default"
# The projections that get adapters, by the names that the supported families give them. The experts of a
# mixture and its routers have none.
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)
# The mask of all layers, or one for every type of layer.
Masks = Tensor | dict[str, Tensor]


def mask_part(masks: Masks, rows: slice, columns: slice = slice(None)) -> Masks:
    """The masks of some of the rows, over some of the keys."""
    if isinstance(masks, Tensor):
        return masks[:, :, rows, columns]
    return {kind: mask[:, :, rows, columns] for kind, mask in masks.items()}


def text_masks(config: Any, stream_mask: Tensor, position_ids: Tensor, stream_numbers: Tensor) -> Masks:
    """The masks of a whole text of A tokens and R of its streams, [B, 1, A + R, A + R].

    stream_mask [B, 1, R, A + R]: the text that a stream may see, and all streams of its position
    position_ids [B, A + R]; stream_numbers [R]
    """
    count = position_ids.shape[1] - stream_numbers.shape[0]
    # Of the streams of its position, a stream sees those up to itself.
    visible = torch.cat((stream_numbers.new_zeros(count), stream_numbers)) <= stream_numbers.unsqueeze(1)
    context = position_ids[:, :count]
    of_main = context.unsqueeze(1) <= context.unsqueeze(2)
    of_main = F.pad(of_main, (0, stream_numbers.shape[0]))
    mask = torch.cat((of_main, stream_mask[:, 0] & visible), dim=1).unsqueeze(1)
    window = sliding_window(config)
    if window is None:
        return mask
    near = position_ids.unsqueeze(1) > position_ids.unsqueeze(2) - window
    return {"full_attention": mask, "sliding_attention": mask & near.unsqueeze(1)}


class UpperLayers(nn.Module):
    """The last ``count`` layers of ``model``. Their own weights are frozen.

    lora_rank: rank of new adapters; None for none
    streams_only: whether the adapters leave rows of the main stream exactly as they are
    angle: the values of stream j are rotated by j times this; 0 for no rotation
    adapters: of every layer, the projections with adapters by name: peft's modules
    """

    def __init__(
        self, model: Any, count: int, *, lora_rank: int | None, streams_only: bool, angle: float
    ) -> None:
        super().__init__()
        decoder = model.get_decoder()
        self._config = model.config
        self._types = layer_types(model.config)[-count:]
        self._rotary_by_type = "full_attention" in (model.config.rope_parameters or {})
        self.rotary_emb = decoder.rotary_emb
        self.layers = nn.ModuleList(_shared_copy(layer) for layer in decoder.layers[-count:]).eval()
        self._rows = _Rows()
        self.adapters: list[dict[str, Any]] = [{} for _ in self.layers]
        if lora_rank is not None:
            self._add_adapters(lora_rank, streams_only)
        if angle:
            for layer in self.layers:
                attention: Any = layer.self_attn
                name = "v_proj" if hasattr(attention, "v_proj") else "qkv_proj"
                sizes = {"num_heads": attention.config.num_key_value_heads, "head_dim": attention.head_dim}
                rotated = _RotatedValues(getattr(attention, name), self._rows, **sizes, angle=angle)
                setattr(attention, name, rotated)

    def _add_adapters(self, rank: int, streams_only: bool) -> None:
        # Importing peft takes seconds, and only streams need it.
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS))
        inject_adapter_in_model(config, self.layers, ADAPTER)
        self.adapters = [
            {
                name.rpartition(".")[2]: module
                for name, module in layer.named_modules()
                if hasattr(module, "lora_A")
            }
            for layer in self.layers
        ]
        if streams_only:
            for adapted in self.adapters:
                for projection in adapted.values():
                    # What an adapter reads passes here first.
                    projection.lora_dropout[ADAPTER] = _StreamRows(self._rows)

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        masks: Masks,  # [B, 1, N, S] bool, True = attend; S = N without a cache
        stream_numbers: Tensor,
        cache: Any = None,  # a Cache of Hugging Face, which numbers the layers as the target model does
    ) -> Tensor:
        """The residual stream [B, N, H] after the layers."""
        self._rows.stream_numbers = stream_numbers
        if isinstance(masks, Tensor):
            masks = dict.fromkeys(self._types, masks)
        if self._config._attn_implementation == "eager":
            # Eager attention adds its mask to the scores.
            least = torch.finfo(hidden.dtype).min
            masks = {kind: torch.where(mask, 0.0, least).to(hidden.dtype) for kind, mask in masks.items()}
        rotary = {
            kind: self.rotary_emb(hidden, position_ids, *((kind,) if self._rotary_by_type else ()))
            for kind in dict.fromkeys(self._types)
        }
        for layer, kind in zip(self.layers, self._types, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[kind],
                position_embeddings=rotary[kind],
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return hidden


class _Rows:
    """Tells the modules inside a layer which rows belong to which stream."""

    stream_numbers: Tensor


class _StreamRows(nn.Module):
    """Replaces rows of the main stream by zeros."""

    def __init__(self, rows: _Rows):
        super().__init__()
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, I] -> the same shape."""
        return x.masked_fill((self._rows.stream_numbers == 0).unsqueeze(-1), 0.0)


class _RotatedValues(nn.Module):
    """A projection whose last columns, the values, are rotated by an angle for each stream.

    The halves of a head's value are the real and the imaginary part of V e^(i angle j), the variant of
    Speculative Streaming (arXiv 2402.11131) without stream embeddings.
    """

    def __init__(self, projection: nn.Module, rows: _Rows, *, num_heads: int, head_dim: int, angle: float):
        super().__init__()
        self.projection = projection
        self._rows = rows
        self._width = num_heads * head_dim
        self._head_dim = head_dim
        self._angle = angle

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, I] -> the projection's output [B, N, O], its last ``width`` columns rotated."""
        projected: Tensor = self.projection(x)
        split = projected.shape[-1] - self._width
        real, imaginary = projected[..., split:].unflatten(-1, (-1, self._head_dim)).chunk(2, dim=-1)
        angles = (self._rows.stream_numbers * self._angle)[:, None, None]  # [N, 1, 1]
        cos, sin = angles.cos().to(projected.dtype), angles.sin().to(projected.dtype)
        rotated = torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)
        return torch.cat((projected[..., :split], rotated), dim=-1) if split else rotated


def _shared_copy(layer: nn.Module) -> nn.Module:
    """A copy whose modules with weights are those of the target model, and whose hooks are gone."""
    # The configuration is shared because it says how to attend.
    shared: list[Any] = [module for module in layer.modules() if not list(module.children())]
    shared += [module.config for module in layer.modules() if hasattr(module, "config")]
    # Experts have weights beside modules.
    shared += [*layer.parameters(), *layer.buffers()]
    own = copy.deepcopy(layer, {id(thing): thing for thing in shared})
    for module in own.modules():
        if list(module.children()):
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    return own

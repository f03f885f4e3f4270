"""Speculative streams: frames that run through the upper layers of the target model itself.

Speculative Streaming (Bhendawade et al., arXiv 2402.11131) has no draft module. At layer N - N_s every
position t of the main stream M, the target model's own hidden states, starts T streams:

    S_tj = f(M_t) + P_j                                                          (equation 3)

f is the identity or a small MLP, P_j a learned embedding; with ``stream_identity = "rotation"`` the values
of stream j are rotated instead. In the upper N_s layers the main stream goes on as ever, and stream j attends
to the main stream up to t and to the streams 1..j of the same t (equation 2). M_t predicts token t + 1, S_tj
token t + 1 + j. An anchor at position p is what M_(p-1) predicts, so its frames are the streams of t = p - 1,
at the rotary positions t + j. ``fused`` frames are made of their streams and the anchor.

The layers have LoRA adapters. In ``lossless`` mode these see streams only and the main stream is the target
model's, exactly; in ``shared`` mode they fine-tune the target model too, and can be merged into it. For
pruning, M_t also gives early-exit logits: LM head(norm(o(M_t))) with o(h) = h + B A h, of low rank.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from drafters.config import DrafterConfig, DrafterConfigError
from drafters.layers import AttentionFunction, KeyValueCache, scaled_dot_product
from drafters.model_files import check_base_weights
from drafters.parallel import ParallelDrafter, last_context
from drafters.target_models import last_layer_logits, output_norm_weight
from drafters.upper_layers import ADAPTER, Masks, UpperLayers, mask_part, text_masks


class ResidualStart(nn.Module):
    """f(M) = M + W_2 silu(W_1 norm(M)), which starts as the identity."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size = config.start_size or config.hidden_size
        self.eps = config.rms_norm_eps
        self.up = nn.Linear(config.hidden_size, size, bias=False)
        self.down = nn.Linear(size, config.hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]."""
        normed = F.rms_norm(hidden, (hidden.shape[-1],), eps=self.eps)
        started: Tensor = hidden + self.down(F.silu(self.up(normed)))
        return started


class AnchorFusion(nn.Module):
    """A frame made of its stream s and the anchor's embedding e: s + W_2 silu(W_1 [s, norm(e)]).

    The streams know the text before the anchor, but not which token the anchor is. At first a frame is its
    stream.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.start_size or config.hidden_size
        self.eps = config.rms_norm_eps
        self.of_stream = nn.Linear(hidden, size, bias=False)
        self.of_anchor = nn.Linear(hidden, size, bias=False)
        self.down = nn.Linear(size, hidden, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, streams: Tensor, anchors: Tensor) -> Tensor:
        """streams [..., T, H] after the last norm, embedded anchors [..., H] -> [..., T, H]."""
        own = self.of_anchor(F.rms_norm(anchors, (anchors.shape[-1],), eps=self.eps))
        frames: Tensor = streams + self.down(F.silu(self.of_stream(streams) + own.unsqueeze(-2)))
        return frames


class LowRankAdapter(nn.Module):
    """A low-rank adapter (LoRA; Hu et al., arXiv 2106.09685): B A x, which starts as zero.

    ``A`` and ``B`` are the names under which the checkpoint of a head keeps the two matrices.
    """

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.A = nn.Linear(inputs, rank, bias=False)
        self.B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        adapted: Tensor = self.B(self.A(x))
        return adapted


class StreamFrames(ParallelDrafter):
    """Frames that are speculative streams.

    ``attach_model`` gives the head the layers that it runs through; the adapters exist from then on, or from
    when a checkpoint is loaded. The layers belong to the target model and are not in the checkpoint.
    """

    norm_weight: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        hidden, frames = config.hidden_size, config.num_frames
        self.start = ResidualStart(config) if config.stream_start == "mlp" else None
        self.fusion = AnchorFusion(config) if config.frame_start == "fused" else None
        self.stream_embeddings = (
            nn.Parameter(torch.randn(frames, hidden) * 0.02)
            if config.stream_identity == "embedding"
            else None
        )
        self.exit_adapter = LowRankAdapter(hidden, hidden, config.exit_rank)
        # Of every layer, the adapters by the names of their projections.
        self.lora = nn.ModuleList()
        # Frozen, as the embedding and the LM head are.
        self.register_buffer("norm_weight", torch.empty(0), persistent=False)
        # A tuple's modules do not become the head's.
        self._attached: tuple[Any, UpperLayers] | None = None

    @property
    def model(self) -> Any:
        """The target model."""
        assert self._attached is not None, "attach_model has not been called"
        return self._attached[0]

    @property
    def lora_adapters(self) -> list[dict[str, LowRankAdapter]]:
        """Of every layer that the streams run through, the adapters by the names of their projections."""
        return [dict(adapters.items()) for adapters in self.lora]  # type: ignore[operator]

    @property
    def upper_layers(self) -> UpperLayers:
        """The target model's layers that the streams run through."""
        assert self._attached is not None, "attach_model has not been called"
        return self._attached[1]

    def attach_model(self, model: Any) -> Self:
        """Run through the upper layers of ``model``, which become frozen.

        Raises DrafterConfigError if the head was made for another model.
        """
        upper = self._attach(model, lora_rank=self.config.lora_rank)
        fresh = nn.ModuleList(
            nn.ModuleDict({name: _as_adapter(projection) for name, projection in adapted.items()})
            for adapted in upper.adapters
        )
        if len(self.lora):
            _check_adapters(self.lora, fresh)
        else:
            self.lora = fresh.to(self.lm_head.device)
        for adapted, own in zip(upper.adapters, self.lora_adapters, strict=True):
            for name, projection in adapted.items():
                projection.lora_A[ADAPTER], projection.lora_B[ADAPTER] = own[name].A, own[name].B
        return self

    def _attach(self, model: Any, *, lora_rank: int | None) -> UpperLayers:
        config = self.config
        if model.config.num_hidden_layers != config.base_num_layers:
            raise DrafterConfigError(
                f"base_num_layers must be the target model's {model.config.num_hidden_layers}, "
                f"got {config.base_num_layers}"
            )
        check_base_weights(config, model)
        super().attach_model(model)
        self.norm_weight = output_norm_weight(model).detach()
        upper = UpperLayers(
            model,
            config.num_layers,
            lora_rank=lora_rank,
            streams_only=config.stream_mode == "lossless",
            # All streams together span a quarter turn.
            angle=math.pi / (2 * config.num_frames) if config.stream_identity == "rotation" else 0.0,
        )
        self._attached = (model, upper)
        return upper

    def start_from(self, norm_weight: Tensor) -> None:
        """No-op: streams use the target model's last norm itself."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of every module; a head that has no adapters yet gets those that the weights describe."""
        if not len(self.lora):
            self.lora = _adapters_of(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def forward(
        self,
        features: Tensor,
        context_position_ids: Tensor,
        anchor_ids: Tensor | None,
        frame_position_ids: Tensor,
        attn_mask: Tensor | None,
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> Tensor:
        """Only fused frames read the anchor tokens; the target model attends in its own way."""
        assert attn_mask is not None
        positions = (context_position_ids, frame_position_ids)
        return self.main_and_frames(features, *positions, anchor_ids, attn_mask)[1]

    def main_and_frames(
        self,
        features: Tensor,
        context_position_ids: Tensor,
        frame_position_ids: Tensor,
        anchor_ids: Tensor | None,
        attn_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The main stream after the last layer, [B, A, H], and the frames' hidden states, [B, M*T, H].

        Arguments as of ``forward``; ``features`` has the hidden states of a whole text, from its first token.
        """
        # Fewer positions than that are the first frames of a single anchor.
        frames = min(self.config.num_frames, frame_position_ids.shape[1])
        # Features from a cache are in half precision, which the layers' own sums are not.
        main = features.to(self.norm_weight.dtype)
        last = last_context(main, context_position_ids, frame_position_ids[:, ::frames])
        numbers = torch.arange(1, frames + 1, device=main.device).repeat(last.shape[1])
        positions = torch.cat((context_position_ids, frame_position_ids), dim=1)
        masks = text_masks(self.model.config, attn_mask, positions, numbers)
        streams = self.start_streams(last)[:, :, :frames].flatten(1, 2)
        if self.config.stream_mode == "lossless":
            # The main stream goes first, and no gradient is kept for it.
            count, cache = main.shape[1], DynamicCache()
            own, following = (
                mask_part(masks, slice(count), slice(count)),
                mask_part(masks, slice(count, None)),
            )
            with torch.no_grad():
                no_numbers = numbers.new_zeros(count)
                main = self.upper_layers(main, context_position_ids, own, no_numbers, cache)
            streams = self.upper_layers(streams, frame_position_ids, following, numbers, cache)
            streams = self._normed(streams)
        else:
            main, streams = self.run_streams(main, streams, positions, numbers, masks)
        return main, self.fuse(streams.unflatten(1, (-1, frames)), anchor_ids).flatten(1, 2)

    def fuse(self, streams: Tensor, anchor_ids: Tensor | None) -> Tensor:
        """Streams after the last norm, [..., T, H], and their anchors [...] -> frames [..., T, H]."""
        if self.fusion is None:
            return streams
        assert anchor_ids is not None, "fused frames need their anchors"
        fused: Tensor = self.fusion(streams, self.embed(anchor_ids))
        return fused

    def start_streams(self, main: Tensor) -> Tensor:
        """The main stream at layer N - N_s, [..., H] -> the T streams of every position, [..., T, H]."""
        started = main if self.start is None else self.start(main)
        started = started.unsqueeze(-2)
        if self.stream_embeddings is None:
            return started.expand(*started.shape[:-2], self.config.num_frames, -1)
        return started + self.stream_embeddings

    def run_streams(
        self,
        main: Tensor,  # [B, A, H], at layer N - N_s
        streams: Tensor,  # [B, R, H], of ``start_streams``
        position_ids: Tensor,  # [B, A + R] int64, stream j of position t at t + j
        stream_numbers: Tensor,  # [R] int64, j of every stream
        masks: Masks,  # [B, 1, A + R, S] bool, True = attend; S = A + R, or the cache's capacity
        cache: Any = None,  # a Cache of Hugging Face
    ) -> tuple[Tensor, Tensor]:
        """Main rows and stream rows through the upper layers together.

        Returns the main stream after the last layer, [B, A, H], before the last norm, and the streams after
        the last norm, [B, R, H], as ``logits`` and the transition read them.
        """
        count = main.shape[1]
        rows = torch.cat((main, streams), dim=1)
        numbers = torch.cat((stream_numbers.new_zeros(count), stream_numbers))
        rows = self.upper_layers(rows, position_ids, masks, numbers, cache)
        return rows[:, :count], self._normed(rows[:, count:])

    def _normed(self, streams: Tensor) -> Tensor:
        weight = self.norm_weight.to(streams.dtype)
        return F.rms_norm(streams, (streams.shape[-1],), weight, self.config.rms_norm_eps)

    def main_logits(self, main: Tensor) -> Tensor:
        """The target model's logits [..., V] of its main stream after the last layer, [..., H]."""
        return last_layer_logits(self.model, main)

    def exit_logits(self, main: Tensor) -> Tensor:
        """Early-exit logits [..., V] of the main stream at layer N - N_s, [..., H]."""
        return last_layer_logits(self.model, main + self.exit_adapter(main))

    @torch.no_grad()
    def merge_shared(self, model: Any) -> Any:
        """A copy of the target model with the adapters of ``shared`` mode added to its weights.

        The copy is the fine-tuned model. From then on the head runs through the copy's layers, without
        adapters, and computes the same.
        """
        merged = copy.deepcopy(model)
        layers = merged.get_decoder().layers[-self.config.num_layers :]
        for layer, adapters in zip(layers, self.lora_adapters, strict=True):
            for name, module in layer.named_modules():
                adapter = adapters.get(name.rpartition(".")[2])
                if adapter is not None:
                    module.weight.add_(adapter.B.weight @ adapter.A.weight)
        self._attach(merged, lora_rank=None)
        return merged


def _as_adapter(projection: Any) -> LowRankAdapter:
    """The adapter that peft has made for a projection."""
    down, up = projection.lora_A[ADAPTER], projection.lora_B[ADAPTER]
    adapter = LowRankAdapter(down.in_features, up.out_features, down.out_features)
    adapter.A, adapter.B = down, up
    return adapter


def _adapters_of(state: Mapping[str, Any]) -> nn.ModuleList:
    """Adapters of the sizes that a checkpoint describes: lora.LAYER.PROJECTION.A.weight and B.weight.

    Raises DrafterConfigError for a checkpoint without adapters, or with a half of one.
    """
    layers: dict[int, dict[str, nn.Module]] = {}
    for name, down in state.items():
        parts = name.split(".")
        if len(parts) == 5 and parts[0] == "lora" and parts[3] == "A":
            up = state.get(name.replace(".A.", ".B."))
            if up is None:
                raise DrafterConfigError(f"{name.replace('.A.', '.B.')} is missing")
            adapter = LowRankAdapter(down.shape[1], up.shape[0], down.shape[0])
            layers.setdefault(int(parts[1]), {})[parts[2]] = adapter
    if not layers:
        raise DrafterConfigError("its adapters, lora.LAYER.PROJECTION.A.weight and B.weight, are missing")
    return nn.ModuleList(nn.ModuleDict(layers[number]) for number in sorted(layers))


def _check_adapters(found: nn.Module, expected: nn.Module) -> None:
    """Raises DrafterConfigError, which names the first weight that differs in shape."""
    own = {name: list(value.shape) for name, value in found.state_dict().items()}
    needed = {name: list(value.shape) for name, value in expected.state_dict().items()}
    for name in sorted(own.keys() | needed.keys()):
        if own.get(name) != needed.get(name):
            wanted = f"must have shape {needed[name]}" if name in needed else "must not be there"
            raise DrafterConfigError(
                f"lora.{name} {wanted} for this target model, got {own.get(name, 'none')}; the head was made "
                "for another one"
            )

"""What a parallel head computes in every engine: the beginning of its frames, and the drafts that they make.

An engine runs the layers between the two with its own cache and attention, and it shares the target model's
embedding and LM head. All shapes are fixed, so that a CUDA graph can capture a pass.

``ShardedLayer`` is such a layer for engines that split it among devices. vLLM and SGLang have projections of
the same names and arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.attention import FusedStart
from drafters.config import DrafterConfig
from drafters.features import ContextProjection
from drafters.lattice import LatticeTensors, chain_search, lattice_tensors
from drafters.layers import RMSNorm, Rotary, RotaryEmbedding, rotate
from drafters.tree_search import TreeTensors, search
from integrations.draft_directory import checked_weights

# By a projection's name in the checkpoint: the merged projection, and what an engine calls its part of that.
MERGED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class Projections:
    """An engine's classes of projections: of queries, keys and values; of columns; of rows."""

    qkv: Callable[..., nn.Module]
    columns: Callable[..., nn.Module]
    rows: Callable[..., nn.Module]


class ShardedLayer(nn.Module):
    """Pre-norm attention of frames to the context and to each other, then a SwiGLU MLP.

    world: devices that share the layer; prefix: a name that no other layer has
    attn: the engine's attention, which a subclass makes
    """

    attn: Any

    def __init__(self, config: DrafterConfig, projections: Projections, *, world: int, prefix: str):
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // world
        self.num_kv_heads = max(1, config.num_kv_heads // world)
        self.sizes = [self.num_heads * config.head_dim, *[self.num_kv_heads * config.head_dim] * 2]
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = projections.qkv(
            hidden,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = projections.rows(
            config.num_heads * config.head_dim, hidden, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = projections.columns(
            hidden, [config.intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = projections.rows(
            config.intermediate_size, hidden, bias=False, prefix=f"{prefix}.down_proj"
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, H] -> queries, keys and values of this device's heads, each [R, heads * D], not rotated."""
        query, key, value = self.qkv_proj(x)[0].split(self.sizes, dim=-1)
        return query, key, value

    def rotated(self, projected: Tensor, rotary: Rotary) -> Tensor:
        """[R, heads * D] -> [R, heads, D]."""
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1).unsqueeze(0)
        return rotate(heads, *rotary).squeeze(0).transpose(0, 1).contiguous()

    def forward(self, frames: Tensor, rotary: Rotary, *arguments: Any) -> Tensor:
        """frames [R, H] of all sequences, whose context is in the cache already -> [R, H].

        arguments: what the engine's attention takes beside queries, keys and values
        """
        query, key, value = self.project(self.input_norm(frames))
        query, key = (self.rotated(each, rotary).flatten(1) for each in (query, key))
        frames = frames + self.o_proj(self.attn(query, key, value.contiguous(), *arguments))[0]
        gate, up = self.gate_up_proj(self.post_norm(frames))[0].chunk(2, dim=-1)
        mixed: Tensor = self.down_proj(F.silu(gate) * up)[0]
        return frames + mixed


def load_sharded(
    own: dict[str, nn.Parameter],
    weights: Iterable[tuple[str, Tensor]],
    default_loader: Callable[..., Any],
) -> None:
    """Fill parameters, by their names, with a draft directory's weights; each device takes its part.

    default_loader: the engine's, for parameters without a loader of their own. Raises DraftError for a weight
    that is missing, or that the head does not have.
    """
    expected = [checkpoint_name for name in own for checkpoint_name in checkpoint_names(name)]
    for name, tensor in checked_weights(weights, expected):
        part = name.split(".")[-2] if "." in name else ""
        whole, shard = MERGED.get(part, (part, None))
        parameter = own[name.replace(part, whole) if part else name]
        loader = getattr(parameter, "weight_loader", default_loader)
        loader(parameter, tensor, *([] if shard is None else [shard]))


def checkpoint_names(name: str) -> list[str]:
    """The weights of a draft directory that a parameter is made of."""
    parts = name.split(".")
    merged = [part for part, (whole, _) in MERGED.items() if len(parts) > 1 and whole == parts[-2]]
    return [name.replace(parts[-2], part) for part in merged] or [name]


# (tokens, width, name) -> a module that looks up vectors of tokens
EmbeddingFactory = Callable[[int, int, str], nn.Module]


def plain_embedding(tokens: int, width: int, name: str) -> nn.Module:
    """An embedding that every device has whole."""
    return nn.Embedding(tokens, width)


class Tables(nn.Module):
    """The transition of ``drafters.transition``, with the labels' vectors that the export has tabulated."""

    def __init__(self, config: DrafterConfig, make_embedding: EmbeddingFactory):
        super().__init__()
        size = config.transition_size
        self.previous = make_embedding(config.vocab_size, size, "previous")
        self.following = make_embedding(config.vocab_size, size, "following")
        self.frame = nn.Linear(config.hidden_size, size, bias=False) if config.transition == "mlp" else None
        self.blank = nn.Parameter(torch.zeros(size), requires_grad=False) if config.has_blank else None

    def of_frames(self, hidden: Tensor) -> Tensor | None:
        """As ``Transition.of_frames``, in float32."""
        return None if self.frame is None else self.frame(hidden).float()

    def of_previous(self, label_ids: Tensor, embed_tokens: object) -> Tensor:
        """As ``Transition.of_previous``, in float32."""
        return self._look_up(self.previous, label_ids)

    def of_following(self, label_ids: Tensor, lm_head: object) -> Tensor:
        """As ``Transition.of_following``, in float32."""
        vectors = self._look_up(self.following, label_ids)
        if self.blank is None:
            return vectors
        blank = self.blank.float().expand(*vectors.shape[:-2], 1, -1)
        return torch.cat((vectors, blank), dim=-2)

    def _look_up(self, table: nn.Module, label_ids: Tensor) -> Tensor:
        found: Tensor = table(label_ids.flatten())
        return found.view(*label_ids.shape, -1).float()


class HeadParts(nn.Module):
    """The parts of a ``ctc`` or ``block`` head beside its layers.

    They have the names of a draft directory's weights.

    make_embedding: makes the tables of a transition, which an engine may split among devices
    """

    def __init__(self, config: DrafterConfig, make_embedding: EmbeddingFactory = plain_embedding):
        super().__init__()
        hidden = config.hidden_size
        self.head_config = config
        self.context = ContextProjection(config)
        self.start = FusedStart(config) if config.frame_start == "fused" else None
        self.frame_queries = nn.Parameter(torch.zeros(config.num_frames, hidden), requires_grad=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.blank = nn.Linear(hidden, 1) if config.has_blank else None
        size = config.draft_vocab_size
        self.draft_token_ids = None if size is None else nn.Parameter(torch.arange(size), requires_grad=False)
        self.tables = Tables(config, make_embedding) if config.transition != "none" else None

    def begin(self, anchors: Tensor, last: Tensor | None, count: int) -> Tensor:
        """What the first ``count`` frames of R sequences begin as, [R, count, H].

        anchors: [R, H], embedded; last: [R, H], the projected context token before each anchor, which only
            ``fused`` frames read
        """
        if self.start is None:
            starts = F.pad(anchors.unsqueeze(1), (0, 0, 0, count - 1))
        else:
            assert last is not None
            starts = self.start(anchors.unsqueeze(0), last.unsqueeze(0), count).squeeze(0)
        return (starts + self.frame_queries[:count]).to(anchors.dtype)

    def chains(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        token_logits: Callable[[Tensor], Tensor],
        *,
        top_k: int,
        num_drafts: int,
    ) -> Tensor:
        """The chains of drafts [R, N] int64 of the frames' hidden states [R, T, H].

        anchor_ids: [R] int64; token_logits: the target model's LM head, [rows, H] -> [rows, V]
        top_k: labels of a frame that the search reads. A frame whose chain has ended repeats its last draft,
            and a chain without drafts has any token, because the engine embeds and verifies all N.
        """
        lattice = self._lattice(hidden, anchor_ids, token_logits, top_k)
        merges = self.head_config.merges_repeats
        drafts, _ = chain_search(lattice, merges_repeats=merges, num_drafts=num_drafts)
        return drafts.clamp(min=0)

    def trees(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        token_logits: Callable[[Tensor], Tensor],
        *,
        top_k: int,
        num_nodes: int,
    ) -> TreeTensors:
        """The trees of N drafts of the frames' hidden states [R, T, H], with the roots.

        The other arguments are those of ``chains``.
        """
        return search(
            self._lattice(hidden, anchor_ids, token_logits, top_k),
            anchor_ids.unsqueeze(1),
            merges_repeats=self.head_config.merges_repeats,
            num_nodes=num_nodes,
        )

    def _lattice(
        self, hidden: Tensor, anchor_ids: Tensor, token_logits: Callable[[Tensor], Tensor], top_k: int
    ) -> LatticeTensors:
        labels = Labels(self, token_logits)
        return lattice_tensors(cast(Any, labels), hidden, anchor_ids, width=top_k)


class Labels:
    """What ``drafters.lattice.lattice_tensors`` asks of a head, where an engine owns the LM head."""

    embed_tokens = lm_head = None

    def __init__(self, parts: HeadParts, token_logits: Callable[[Tensor], Tensor]):
        self.config, self.blank, self.transition = parts.head_config, parts.blank, parts.tables
        self._drafted, self._token_logits = parts.draft_token_ids, token_logits

    def label_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, T, H] -> [R, T, L]."""
        logits = self._token_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        # The LM head is the target model's, which has the rows of all tokens.
        return logits if self._drafted is None else logits[..., self._drafted]

    def token_ids(self, label_ids: Tensor) -> Tensor:
        """As ``Drafter.token_ids``."""
        return label_ids if self._drafted is None else self._drafted[label_ids]

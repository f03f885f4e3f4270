"""The draft model behind TensorRT-LLM's decoding type ``DFlash`` that drafts with a head of ours.

The engine's worker hands over the target model's hidden states of the chosen layers, and keeps the keys and
values that the draft model makes of them in an arena. For every sequence it asks for one pass over a block,
the anchor and mask tokens. Here the pass computes all frames of the head, and it ends with a search for the
chain of drafts. The worker takes the largest logit of every row of the block, so the draft model returns
logits that are -inf except at the draft.

The arena has a slot for every sequence and in it, layer by layer, the keys and values of the positions from 0
on. The layers are those of ``drafters.layers``. Every device computes the whole head.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import DraftLayer, rotate
from integrations.draft_directory import DraftError, DraftSettings, checked_weights, model_problem
from integrations.frames import HeadParts

# Layouts of the context's keys and values that the draft model can read: one piece for every sequence.
ATTENTION_BACKEND = "VANILLA"
# Target models of which TensorRT-LLM gives the hidden states to a draft model, among those that are exported.
TARGET_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")


def serving_problem(head: DrafterConfig, spec_config: Any, mapping: Any) -> str | None:
    """Why a head cannot draft as it is asked to, or None.

    spec_config, mapping: TensorRT-LLM's speculative configuration, and how it divides the model
    """
    drafts = spec_config.max_draft_len
    if not 1 <= drafts <= head.num_frames:
        return f"max_draft_len: expected 1 to {head.num_frames}, the head's frames, got {drafts}"
    if spec_config.attention_backend != ATTENTION_BACKEND:
        return (
            f"attention_backend: expected {ATTENTION_BACKEND}, whose context is not paged, got "
            f"{spec_config.attention_backend!r}"
        )
    if mapping.pp_size > 1:
        return (
            "pipeline_parallel_size: expected 1, because the head shares the model's embedding and LM head, "
            f"got {mapping.pp_size}"
        )
    return None


class Arena:
    """The context of B sequences as the cache of one pass, whose own keys and values are not kept.

    keys, values: [slots, layers, positions, KV heads, D]; slots: [B] int64
    """

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor):
        self._keys, self._values, self._slots = keys, values, slots
        self.size = keys.shape[2]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As ``KeyValueCache``: new ones [B, KV heads, T, D] -> [B, KV heads, positions + T, D]."""
        kept = (table[self._slots, layer].transpose(1, 2) for table in (self._keys, self._values))
        keys, values = (torch.cat(pair, dim=2) for pair in zip(kept, (key, value), strict=True))
        return keys, values


class Frames(HeadParts):
    """``drafters.attention.AttentionFrames`` on the arena."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.draft_layers = [DraftLayer(config, layer) for layer in range(config.num_layers)]
        self.layers = nn.ModuleList(self.draft_layers)

    def context_keys_values(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Projected context [N, H] at positions [N] -> keys and values, each [N, layers, KV heads, D]."""
        rotary = self.rotary(positions.unsqueeze(0))
        keys, values = [], []
        for layer in self.draft_layers:
            key, value = (
                projection(context).unflatten(-1, (layer.num_kv_heads, layer.head_dim))
                for projection in (layer.k_proj, layer.v_proj)
            )
            # rotate wants the heads before the positions.
            keys.append(rotate(key.transpose(0, 1).unsqueeze(0), *rotary).squeeze(0).transpose(0, 1))
            values.append(value)
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)

    def forward(
        self, anchors: Tensor, last: Tensor | None, positions: Tensor, lengths: Tensor, arena: Arena
    ) -> Tensor:
        """The hidden states [B, T, H] of all frames.

        anchors: [B, H], embedded; last: as for ``begin``; positions: [B] int64, the anchors'
        lengths: [B], the context's
        """
        count = self.head_config.num_frames
        frame_positions = positions.unsqueeze(1) + torch.arange(count, device=positions.device)
        rotary = self.rotary(frame_positions)
        is_context = torch.arange(arena.size, device=lengths.device) < lengths.unsqueeze(1)
        is_frame = is_context.new_ones(1, count).expand(len(positions), -1)
        # Every frame sees the same: the context and all frames.
        mask = torch.cat((is_context, is_frame), dim=1)[:, None, None, :]
        frames = self.begin(anchors, last, count)
        for layer in self.draft_layers:
            normed = layer.input_norm(frames)
            frames = layer.update(frames, normed, normed, rotary, rotary, mask, arena, attend)
        hidden: Tensor = self.norm(frames)
        return hidden


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As ``scaled_dot_product``, for a mask [B, 1, 1, S] that is every query's.

    The query heads that share keys stand below each other as rows of one head, because the fast kernels for
    masks take as many query heads as key heads.
    """
    heads, count = query.shape[1:3]
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
    return found.unflatten(2, (-1, count)).reshape(-1, heads, count, query.shape[-1])


class AnchorEmbedding(nn.Module):
    """The target model's embedding, which remembers the ids that it was asked for last.

    The worker embeds the anchors and the mask token together and hands over the vectors alone, while a
    transition needs the anchors' ids.
    """

    def __init__(self, embed_tokens: nn.Module):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.ids: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.embed_tokens.weight  # type: ignore[assignment]
        return found

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.ids = ids
        return self.embed_tokens(ids, *args, **kwargs)


class DFlashCTCForCausalLM(nn.Module):
    """A ``ctc`` or ``block`` head, with the members that TensorRT-LLM's worker asks a draft model for.

    model_config, draft_config: TensorRT-LLM's, of the target model and of the draft directory

    Raises DraftError for a head that does not fit the target model or what is asked of it.
    """

    def __init__(self, model_config: Any, draft_config: Any):
        super().__init__()
        spec_config, target = model_config.spec_config, model_config.pretrained_config
        self.directory = str(spec_config.speculative_model)
        # Mappers of weights ask for these two.
        self.model_config, self.config = draft_config, draft_config.pretrained_config
        settings = DraftSettings.read(self.config, self.directory)
        self.head_config, self.top_k = settings.head, settings.top_k
        problem = model_problem(
            self.head_config,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_hidden_layers,
        ) or serving_problem(self.head_config, spec_config, model_config.mapping)
        if problem:
            raise DraftError(f"{self.directory}: {problem}")
        self.dflash_attention_backend = spec_config.attention_backend
        # Any token may be the mask token, because the head embeds the anchor alone.
        self.mask_token_id = 0
        self.target_layer_ids = list(self.head_config.target_layer_ids)
        # The worker's block has the anchor and a draft of every frame.
        self.block_size = self.head_config.num_frames + 1
        self._num_attn_layers = self.head_config.num_layers
        self._num_heads, self._num_kv_heads = self.head_config.num_heads, self.head_config.num_kv_heads
        self._head_dim = self.head_config.head_dim
        # The engine builds models without memory and fills them later, so modules come with their weights.
        self.head: Frames | None = None
        self.model = nn.Module()
        self.draft_model_full = nn.Module()
        self.draft_model_full.model = self.model
        self._new_context: tuple[Tensor, Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """The engine assigns the target model's processor of logits to the name of ours."""
        super().__setattr__("target_processor" if name == "logits_processor" else name, value)

    @property
    def loaded(self) -> Frames:
        """The head with its weights."""
        if self.head is None:
            raise DraftError(f"{self.directory}: load_format: expected auto, because the head has no weights")
        return self.head

    @property
    def fc(self) -> nn.Linear:
        """The worker takes the number format of the arena from this projection."""
        return self.loaded.context.feature_proj

    @property
    def hidden_norm(self) -> nn.Module:
        """The worker asks whether there is a norm of the context."""
        return self.loaded.context.context_norm

    def load_weights(self, weights: Mapping[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """Take a draft directory's weights. Raises DraftError for one that is missing, or not the head's."""
        head = Frames(self.head_config)
        named = ((name, weights[name]) for name in list(weights.keys()))
        expected = [name for name, _ in head.named_parameters()]
        head.load_state_dict(dict(checked_weights(named, expected)), assign=True)
        self.head = head.requires_grad_(False)

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Share the target model's embedding and LM head, and move to their device."""
        self.lm_head = target_model.lm_head
        embed_tokens = AnchorEmbedding(target_model.model.embed_tokens)
        self.model.embed_tokens = embed_tokens
        self.loaded.to(embed_tokens.weight.device)

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Features [N, F*H] -> context [N, H]."""
        context: Tensor = self.loaded.context(hidden_states.to(self.fc.weight.dtype))
        return context

    def precompute_context_kv(
        self, projected_hidden: Tensor, positions: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Context [N, H] at positions [N] -> keys and values for the arena, each [N, layers, KV heads, D].

        In a step that drafts, the last call has the rows that the step verified, K + 1 of every sequence.
        """
        self._new_context = projected_hidden, positions
        return self.loaded.context_keys_values(projected_hidden, positions)

    def _build_fused_kv_buffers(self) -> None:
        """The worker calls this before it reads the sizes of the arena, which are known already."""

    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor,
        ctx_v_cache: Tensor,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: Tensor | None = None,
        ctx_page_table: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The drafts [B * block, 1] int64, each in the row of its mask token; an anchor's row means nothing.

        noise_embedding: [B, block, H], the first row the anchor's; query_positions: [B, block] int64
        num_ctx_per_req: [B], the lengths of the contexts; ctx_cache_batch_idx: [B], slots of the arena
        ctx_k_cache, ctx_v_cache: the arena, [slots, layers, positions, KV heads, D]
        """
        head, (sequences, block) = self.loaded, query_positions.shape
        positions = query_positions[:, 0]
        embedding = self.model.embed_tokens
        assert isinstance(embedding, AnchorEmbedding)
        assert embedding.ids is not None
        anchors = noise_embedding[:, 0].to(self.fc.weight.dtype)
        last = None if head.start is None else self._last_context(positions)
        arena = Arena(ctx_k_cache, ctx_v_cache, ctx_cache_batch_idx.long())
        hidden = head(anchors, last, positions, num_ctx_per_req, arena)
        drafts = head.chains(
            hidden,
            embedding.ids[:sequences].long(),
            self._token_logits,
            top_k=self.top_k,
            num_drafts=block - 1,
        )
        return F.pad(drafts, (1, 0)).view(-1, 1)

    def logits_processor(
        self,
        hidden_states: Tensor,
        lm_head: Any,
        attn_metadata: Any,
        return_context_logits: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Rows of ``dflash_forward`` [R, 1] -> logits [R, V], which are -inf except at the drafts."""
        size = (hidden_states.shape[0], self.head_config.vocab_size)
        logits = torch.full(size, -torch.inf, device=hidden_states.device)
        return logits.scatter_(1, hidden_states, 0.0)

    def _last_context(self, positions: Tensor) -> Tensor:
        """The projected context token [B, H] before each of the anchors at these positions [B].

        It is the last accepted one of the rows that the step verified.
        """
        assert self._new_context is not None
        rows = self._new_context[0].unflatten(0, (len(positions), -1))
        starts = self._new_context[1].view(len(positions), -1)[:, 0]
        index = (positions - starts - 1).clamp(0, rows.shape[1] - 1)
        return rows[torch.arange(len(positions), device=positions.device), index]

    def _token_logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, V] of the target model's LM head."""
        # With the last argument, rows are not selected, so the step's metadata is not read.
        processor: Any = self.target_processor
        logits: Tensor = processor(hidden, self.lm_head, None, True)
        vocab_size = self.head_config.vocab_size
        if logits.shape[1] < vocab_size:
            raise DraftError(
                f"{self.directory}: LM head: expected logits of all {vocab_size} tokens on every device, got "
                f"{logits.shape[1]}"
            )
        return logits[:, :vocab_size]

"""The draft model behind SGLang's algorithm ``DFLASH`` that drafts with a head of ours.

The engine's worker writes the keys and values that the draft model makes of the target model's hidden states,
and asks for one pass over a block for every sequence: the anchor and mask tokens, which are the head's first
frames. The pass ends with a search over their lattice. Its chain or tree of drafts is what the pass returns
as hidden states, and ``integrations.sglang.hooks`` hands it on.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import RotaryEmbedding
from integrations.draft_directory import TREE, DraftError, DraftSettings, model_problem
from integrations.frames import HeadParts, Projections, ShardedLayer, load_sharded
from integrations.sglang.settings import block_problem, lm_head_problem

PROJECTIONS = Projections(QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)


class FrameLayer(ShardedLayer):
    """A layer with SGLang's cache and attention, and the members that its worker asks for."""

    def __init__(self, config: DrafterConfig, rotary: RotaryEmbedding, *, index: int):
        world = get_parallel().tp_size
        super().__init__(config, PROJECTIONS, world=world, prefix=f"layers.{index}")
        self.attn = RadixAttention(
            self.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            self.num_kv_heads,
            index,
            attn_type=AttentionType.ENCODER_ONLY,
        )
        # Of the head, which all layers share; in a list, so that it is no module of this one too.
        self._rotary = [rotary]

    @property
    def self_attn(self) -> "FrameLayer":
        """The worker asks the layer's attention for what follows."""
        return self

    def kv_proj_only(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Context [N, H] -> keys and values, each [N, KV heads * D]."""
        _, key, value = self.project(hidden_states)
        return key, value.contiguous()

    def apply_k_norm(self, k: Tensor) -> Tensor:
        """A head's keys have no norm."""
        return k

    def apply_k_rope(self, positions: Tensor, k: Tensor) -> Tensor:
        """Keys [N, KV heads * D] at these positions [N], rotated."""
        return self.rotated(k, self._rotary[0](positions.unsqueeze(0))).flatten(1)


class DFlashCTCForCausalLM(HeadParts):
    """A ``ctc`` or ``block`` head, with the members that SGLang's worker asks a draft model for.

    Raises DraftError for a draft directory that cannot be used.
    """

    # The worker's fused kernel norms keys. Without it the worker asks each layer for keys and values.
    supports_fused_context_kv = False
    # Heads of other kinds.
    candidate_selector = lilicorr = None
    last_context: Tensor | None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        settings = DraftSettings.read(config, getattr(config, "_name_or_path", "") or "draft")
        super().__init__(settings.head)
        self.config, self.top_k, self.shape = config, settings.top_k, settings.shape
        self.block_size = settings.head.num_frames
        self.frame_layers = [
            FrameLayer(settings.head, self.rotary, index=index) for index in range(settings.head.num_layers)
        ]
        self.layers = nn.ModuleList(self.frame_layers)
        # In lists, because they are not the draft model's parameters.
        self._lm_head: list[Any] = []
        # Of every place for a request, the projected context token before the next anchor.
        self.register_buffer("last_context", None, persistent=False)

    def attach(self, target: Any, *, model_config: Any, num_requests: int) -> None:
        """Share the target model's LM head, and make room for this many requests.

        target, model_config: SGLang's model, and its configuration. Raises DraftError where the head does not
        fit it, or where requests are divided among devices.
        """
        problem = model_problem(
            self.head_config,
            vocab_size=model_config.vocab_size,
            hidden_size=model_config.hidden_size,
            num_layers=model_config.num_hidden_layers,
        ) or lm_head_problem(target.lm_head)
        if get_parallel().attn_dp_enabled:
            problem = "enable_dp_attention: expected false, because drafts need the whole LM head, got true"
        if problem:
            raise DraftError(f"draft model: {problem}")
        self._lm_head = [target.lm_head]
        if self.start is not None:
            weight = self.frame_queries
            size = (num_requests, self.head_config.hidden_size)
            # It is written outside inference mode too.
            with torch.inference_mode(False):
                self.last_context = torch.zeros(size, dtype=weight.dtype, device=weight.device)

    def set_block_size(self, block_size: int) -> None:
        """The worker's block: the anchor and the drafts. Raises DraftError for one that is too long."""
        problem = block_problem(self.head_config, int(block_size))
        if problem:
            raise DraftError(f"draft model: {problem}")
        self.block_size = int(block_size)

    def get_input_embeddings(self) -> None:
        """The worker embeds blocks with the target model's embedding."""

    def prepare_context_hidden_for_kv(self, layer: nn.Module, ctx_hidden: Tensor) -> Tensor:
        return ctx_hidden

    def project_target_hidden(self, target_hidden: Tensor) -> Tensor:
        """Features [N, F*H] -> context [N, H]."""
        context: Tensor = self.context(target_hidden.to(self.frame_queries.dtype))
        return context

    @torch.no_grad()
    def keep_last(self, features: Tensor, requests: Tensor) -> None:
        """Keep the context tokens of these features [B, F*H] for the next blocks of these requests [B]."""
        if self.last_context is not None:
            self.last_context[requests] = self.project_target_hidden(features)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """The drafts [B * block, 1] int64, each in the row of its mask token; an anchor's row means nothing.

        Drafts of trees have a second column, the places of their parents in the block; -1 for a row that is
        no draft.

        input_ids, positions: [B * block] int64; input_embeds: [B * block, H], of the input ids
        """
        assert input_embeds is not None
        block, rows = self.block_size, input_ids.shape[0]
        none = torch.zeros_like(input_ids).unsqueeze(1).expand(-1, 2 if self.shape == TREE else 1)
        if not rows:
            return _output(none)
        anchors = input_embeds[::block].to(self.frame_queries.dtype)
        last = None
        if self.start is not None:
            last = torch.zeros_like(anchors)
            if self.last_context is not None:
                last = self.last_context[forward_batch.req_pool_indices[: len(anchors)].long()]
        hidden = self.begin(anchors, last, block).flatten(0, 1)[:rows]
        rotary = self.rotary(positions.unsqueeze(0))
        for layer in self.frame_layers:
            hidden = layer(hidden, rotary, forward_batch)
        hidden = self.norm(hidden)
        if not self._lm_head:
            # A pass that measures memory, before the target model is shared.
            return _output(none)
        hidden = F.pad(hidden, (0, 0, 0, len(anchors) * block - rows)).unflatten(0, (-1, block))
        search = (hidden, input_ids[::block].long(), self._token_logits)
        if self.shape == TREE:
            tree = self.trees(*search, top_k=self.top_k, num_nodes=block - 1)
            return _output(torch.stack((tree.tokens, tree.parents), dim=-1).flatten(0, 1)[:rows])
        drafts = self.chains(*search, top_k=self.top_k, num_drafts=block - 1)
        return _output(F.pad(drafts, (1, 0)).flatten()[:rows].unsqueeze(1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a draft directory's weights. Raises DraftError for one that is missing, or not the head's."""
        load_sharded(dict(self.named_parameters()), weights, default_weight_loader)

    def _token_logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, V] of the target model's LM head, whose rows the devices share."""
        weight = self._lm_head[0].weight
        logits = F.linear(hidden.to(weight.dtype), weight)
        if get_parallel().tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[:, : self.head_config.vocab_size]


def _output(drafts: Tensor) -> Any:
    return LogitsProcessorOutput(next_token_logits=None, hidden_states=drafts)


EntryClass = DFlashCTCForCausalLM

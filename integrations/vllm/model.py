"""The model behind vLLM's method ``dflash`` that drafts with a head of ours.

vLLM hands over the target model's hidden states of the chosen layers and asks, for every sequence, for one
pass over the anchor and N mask tokens. Those are the head's first N + 1 frames. The pass ends with a search
over their lattice, whose chain of N drafts is the pass's output.
"""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from integrations.draft_directory import DraftError, DraftSettings, model_problem
from integrations.frames import load_sharded
from integrations.vllm.frames import Frames
from integrations.vllm.settings import serving_problem


class DFlashCTCForCausalLM(DFlashQwen3ForCausalLM):
    """A ``ctc`` or ``block`` head.

    vLLM asks whether the class derives from its own; nothing else of the base class is used.

    Raises DraftError for a head that does not fit the target model or what is asked of it.
    """

    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.draft_model_config = speculative.draft_model_config
        self.config = self.draft_model_config.hf_config
        settings = DraftSettings.read(self.config, self.draft_model_config.model)
        self.head_config, self.top_k = settings.head, settings.top_k
        # While a draft model is built, ``model_config`` may be its own.
        target = speculative.target_model_config or model
        problem = model_problem(
            self.head_config,
            vocab_size=target.get_vocab_size(),
            hidden_size=target.get_hidden_size(),
            num_layers=target.get_total_num_hidden_layers(),
        ) or serving_problem(self.head_config, speculative, vllm_config.parallel_config)
        if problem:
            raise DraftError(f"{self.draft_model_config.model}: {problem}")
        self.num_drafts = speculative.num_speculative_tokens
        self.model = Frames(
            self.head_config,
            vllm_config,
            first_layer=target.get_total_num_hidden_layers(),
            prefix=f"{prefix}.model" if prefix else "model",
        )
        # vLLM replaces it with the target model's.
        self.lm_head = ParallelLMHead(
            self.head_config.vocab_size, self.head_config.hidden_size, prefix=f"{prefix}.lm_head"
        )
        self.logits_processor = LogitsProcessor(self.head_config.vocab_size)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Features [A, F*H] -> context [A, H]."""
        context: Tensor = self.model.context(hidden_states)
        return context

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Any = None,
    ) -> None:
        """Write new context into the head's cache; without slots nothing is written."""
        self.model.store_context(context_states, context_positions, context_slot_mapping)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """The drafts [R, 1] int64, each in the row of its mask token; an anchor's row means nothing."""
        rows, frames = input_ids.shape[0], self.num_drafts + 1
        hidden = self.model(input_ids, positions)
        anchors = input_ids[::frames]
        hidden = F.pad(hidden, (0, 0, 0, anchors.shape[0] * frames - rows)).unflatten(0, (-1, frames))
        drafts = self.model.chains(
            hidden, anchors, self._token_logits, top_k=self.top_k, num_drafts=self.num_drafts
        )
        return F.pad(drafts, (1, 0)).flatten()[:rows].unsqueeze(1)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The drafts that the pass has found: [R, 1] -> [R]."""
        return hidden_states.squeeze(1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        raise NotImplementedError("use_local_argmax_reduction: expected true; a chain has no logits")

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [layer.attn.layer_name for layer in self.model.frame_layers]

    def get_draft_attn_causal(self) -> list[bool]:
        return [False] * len(self.model.frame_layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take a draft directory's weights; each device takes its part.

        Raises DraftError for one that is missing, or that the head does not have.
        """
        own = dict(self.model.named_parameters())
        # The embedding is the target model's.
        written = {name: value for name, value in own.items() if name != "embed_tokens.weight"}
        load_sharded(written, weights, default_weight_loader)
        return {f"model.{name}" for name in own} | {"lm_head.weight"}

    def _token_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.logits_processor(self.lm_head, hidden)
        return logits

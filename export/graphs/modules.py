"""The torch modules that are traced: a target model and draft heads behind their graph contracts.

Every ``forward`` takes the contract's inputs by name, and the cache's keys and values in their order.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.autoregressive import AutoregressiveDrafter
from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.layers import AttentionFunction, pick
from drafters.parallel import ParallelDrafter
from drafters.target_models import output_logits
from export.graphs.layers import (
    ATTENTION_OPS,
    ScatterCache,
    attention_masks,
    register_attention,
    register_experts,
)


class TargetModelGraph(nn.Module):
    """One pass of a causal LM: logits, their argmax, and the features for a draft head.

    context: the positions that are served
    attention: a name of ``export.options.ATTENTION``
    The model attends, and computes experts, in the forms that are exported until ``close``.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...], context: int, attention: str):
        super().__init__()
        self.model = model
        self._context = context
        self._tap = FeatureTap(model, layer_ids)
        self._own_experts = model.config._experts_implementation
        model.set_attn_implementation(register_attention(attention))
        model.set_experts_implementation(register_experts())

    def close(self) -> None:
        """Restore the model, except its form of attention, which every user of the model sets anyway."""
        self._tap.remove()
        self.model.set_experts_implementation(self._own_experts)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"])
        hidden = self.model.get_decoder()(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=attention_masks(self.model.config, inputs, self._context),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        # Only these positions go through the LM head, the widest matrix of a small model.
        logits = output_logits(self.model, pick(hidden, inputs["logit_indices"]))
        return logits, logits.argmax(-1), self._tap.take(), *cache.present


class ParallelGraph(nn.Module):
    """One pass of a parallel drafter: the lattice of its frames."""

    def __init__(self, drafter: ParallelDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        self._attend = _attention(drafter, attention)
        drafter.tabulate()

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        anchors = inputs.get("anchor_ids")
        hidden = self.drafter(
            inputs["features"],
            inputs["context_position_ids"],
            anchors,
            inputs["frame_position_ids"],
            inputs.get("attn_mask"),
            cache=cache,
            attend=self._attend,
        )
        anchors = None if anchors is None else anchors.squeeze(1)
        lattice = lattice_tensors(self.drafter, hidden, anchors, width=self.width)
        return *lattice.present().values(), *(() if cache is None else cache.present)


class AutoregressiveGraph(nn.Module):
    """One pass of an autoregressive drafter: the best children of every node, and their states."""

    def __init__(self, drafter: AutoregressiveDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        drafter.tabulate()
        self._attend = _attention(drafter, attention)
        if drafter.heads_per_depth:
            self._attend = _with_spare_query(self._attend)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        hidden, states = self.drafter(inputs, cache=cache, attend=self._attend)
        tokens, log_probs = self.drafter.best_children(hidden, self.width)
        return tokens, log_probs, states, *(() if cache is None else cache.present)


def _attention(drafter: ParallelDrafter | AutoregressiveDrafter, kind: str) -> AttentionFunction:
    operator, scale = ATTENTION_OPS[kind], drafter.config.head_dim**-0.5
    return lambda query, key, value, mask: operator(query, key, value, mask, scale)


def _with_spare_query(attend: AttentionFunction) -> AttentionFunction:
    """Attention that works without queries: ONNX Runtime needs one, and Hydra++ drafts without any."""

    def spare(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch, heads, _, size = query.shape
        query = torch.cat((query, query.new_zeros(batch, heads, 1, size)), dim=2)
        mask = torch.cat((mask, mask.new_ones(batch, 1, 1, mask.shape[-1])), dim=2)
        return attend(query, key, value, mask)[:, :, :-1]

    return spare

"""The torch modules that are traced: a backbone and a draft head behind their graph contracts."""

from torch import Tensor, nn

from drafters.ctc import CTCDrafter
from drafters.features import FeatureTap
from export.graph_ops import ATTENTION_OPS, ScatterCache


class BackboneGraph(nn.Module):
    """A causal LM behind the backbone contract (``export.contracts``)."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        super().__init__()
        self.model = model
        self._tap = FeatureTap(model, layer_ids)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attn_mask: Tensor,
        write_index: Tensor,
        logit_indices: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, write_index)
        hidden = self.model.get_decoder()(  # type: ignore[operator]
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attn_mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        # Only these rows go through the LM head, the widest matrix of a small model.
        rows = hidden.gather(1, logit_indices.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits = self.model.lm_head(rows)  # type: ignore[operator]
        return logits, logits.argmax(-1), self._tap.take(), *cache.present


class DrafterGraph(nn.Module):
    """A CTC draft head behind the drafter contract: top-K labels of every frame, and the blank."""

    def __init__(self, drafter: CTCDrafter, lattice_width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.lattice_width = lattice_width
        operator = ATTENTION_OPS[attention]
        scale = drafter.config.head_dim**-0.5
        self._attend = lambda query, key, value, mask: operator(query, key, value, mask, scale)

    def forward(
        self,
        features: Tensor,
        context_position_ids: Tensor,
        anchor_ids: Tensor,
        frame_position_ids: Tensor,
        attn_mask: Tensor,
        write_index: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, write_index)
        logits = self.drafter(
            features,
            context_position_ids,
            anchor_ids,
            frame_position_ids,
            attn_mask,
            cache=cache,
            attend=self._attend,
        )
        total = logits.logsumexp(-1, keepdim=True)
        # The labels' logits are all but the last column; only the best K are normalised.
        top, tokens = logits[..., :-1].topk(self.lattice_width, dim=-1)
        return tokens, top - total, (logits[..., -1:] - total).squeeze(-1), *cache.present

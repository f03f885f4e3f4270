"""The torch modules that are traced: a backbone and a draft head behind their graph contracts."""

from torch import Tensor, nn

from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from export.graph_ops import ATTENTION_OPS, ScatterCache


class TargetModelGraph(nn.Module):
    """A causal LM behind the backbone contract (``export.contracts``)."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        super().__init__()
        self.model = model
        self._tap = FeatureTap(model, layer_ids)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """inputs: those of the contract, by name."""
        cache = ScatterCache(past, inputs["write_index"])
        hidden = self.model.get_decoder()(  # type: ignore[operator]
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=inputs["attn_mask"],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        # Only these rows go through the LM head, the widest matrix of a small model.
        rows = hidden.gather(1, inputs["logit_indices"].unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits = self.model.lm_head(rows)  # type: ignore[operator]
        return logits, logits.argmax(-1), self._tap.take(), *cache.present


class ParallelGraph(nn.Module):
    """A frame head behind its contract: the lattice of its frames."""

    def __init__(self, drafter: ParallelDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        operator = ATTENTION_OPS[attention]
        scale = drafter.config.head_dim**-0.5
        self._attend = lambda query, key, value, mask: operator(query, key, value, mask, scale)
        if drafter.transition is not None:
            drafter.transition.tabulate(drafter.embed_tokens, drafter.lm_head)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """inputs: those of the contract, by name."""
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        hidden = self.drafter(
            inputs["features"],
            inputs["context_position_ids"],
            inputs.get("anchor_ids"),
            inputs["frame_position_ids"],
            inputs.get("attn_mask"),
            cache=cache,
            attend=self._attend,
        )
        anchors = inputs.get("anchor_ids")
        lattice = lattice_tensors(
            self.drafter,
            hidden,
            None if anchors is None else anchors.squeeze(1),
            width=self.width,
        )
        return *lattice.present().values(), *(() if cache is None else cache.present)

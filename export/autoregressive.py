"""A sequential draft head behind its contract: the module that is traced."""

import torch
from torch import Tensor, nn

from drafters.autoregressive import AutoregressiveDrafter
from export.graph_ops import ATTENTION_OPS, ScatterCache


class AutoregressiveGraph(nn.Module):
    """One pass of the head: every row's best children, and the states they start from."""

    def __init__(self, drafter: AutoregressiveDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        self._operator = ATTENTION_OPS[attention]
        self._scale = drafter.config.head_dim**-0.5
        self._attend = self._attend_or_not if drafter.heads_per_depth else self._attend_always

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """inputs: those of the contract, by name."""
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        hidden, states = self.drafter(inputs, cache=cache, attend=self._attend)
        tokens, log_probs = self.drafter.best_children(hidden, self.width)
        return tokens, log_probs, states, *([] if cache is None else cache.present)

    def _attend_always(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return self._operator(query, key, value, mask, self._scale)

    def _attend_or_not(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of any number of queries: a draft pass of Hydra++ has none, ONNX Runtime wants one."""
        batch, heads, _, size = query.shape
        query = torch.cat((query, query.new_zeros(batch, heads, 1, size)), dim=2)
        mask = torch.cat((mask, mask.new_ones(batch, 1, 1, mask.shape[-1])), dim=2)
        return self._operator(query, key, value, mask, self._scale)[:, :, :-1]

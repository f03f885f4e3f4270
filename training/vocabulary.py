"""What a loss needs of the logits over the whole vocabulary, without keeping the logits.

A head's logits are its hidden states times an LM head. The losses need the log-sum-exp and the best few
labels of each hidden state; the logit of a given label is one product. So the hidden states go through the
LM head a block at a time, and again when the gradient is computed, and the logits and their gradients are
never all in memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Hidden states of one block, each of which reads the whole LM head: with a vocabulary of 151,936, blocks of
# 6, 64, 256 and 1,152 took 81, 16, 12 and 11 s on two CPU cores. 256 rows of such logits are 156 MB.
BLOCK_ROWS = 256


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        total = hidden.new_empty(rows, dtype=torch.float32)
        top = hidden.new_empty(rows, count, dtype=torch.float32)
        tokens = torch.empty(rows, count, dtype=torch.long, device=hidden.device)
        for part in _blocks(rows):
            logits = F.linear(hidden[part], weight).float()
            total[part] = logits.logsumexp(-1)
            if count:
                top[part], tokens[part] = logits.topk(count, dim=-1)
        ctx.save_for_backward(hidden, weight, total, tokens)
        ctx.mark_non_differentiable(tokens)
        return total, top, tokens

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: Tensor, grad_top: Tensor, _: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, total, tokens = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _blocks(hidden.shape[0]):
            logits = F.linear(hidden[part], weight).float()
            logits = logits.sub_(total[part].unsqueeze(-1)).exp_().mul_(grad_total[part].unsqueeze(-1))
            if tokens.shape[1]:
                logits.scatter_add_(1, tokens[part], grad_top[part])
            grad = logits.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS)]


def vocabulary_statistics(hidden: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp and the best ``count`` of the logits ``hidden @ weight.T``.

    hidden [..., H], weight [V, H] -> total [...] float32, top [..., count] float32, tokens [..., count].
    Computed in autocast's type where it is on; differentiable in both.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        flat = hidden.flatten(0, -2)
        total, top, tokens = _Statistics.apply(flat, weight, count)
    leading = hidden.shape[:-1]
    return total.view(leading), top.view(*leading, count), tokens.view(*leading, count)

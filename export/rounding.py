"""Give a torch module the rounded weights of its graph, so that PyTorch is a reference for them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.graphs.quantization import QuantizedMatrix, digest


@dataclass(frozen=True)
class Rounded:
    """What a graph computes with, by the digest of what it was.

    matrices: weights [K, N] of products, as ``quantize_products`` returns them
    tables: transposed token embeddings [H, V], as ``quantize_embedding`` returns them
    """

    matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    tables: dict[str, QuantizedMatrix] = field(default_factory=dict)


@torch.no_grad()
def round_parameters(module: nn.Module, rounded: Rounded) -> None:
    """Replace every matrix of ``module`` that its graph has quantised by what the graph computes with.

    A parameter [..., N, K] or [E, K, N] may hold several matrices. An embedding and an LM head that were one
    parameter are two afterwards.
    Raises ExportError if a quantised matrix is none of the module's.
    """
    missing_matrices, missing_tables = set(rounded.matrices), set(rounded.tables)
    for owner in module.modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            # A draft head's embedding is a buffer of this name.
            is_table = isinstance(owner, nn.Embedding) or name == "embed_tokens"
            wanted = rounded.tables if is_table else rounded.matrices
            replaced = _replace(tensor.detach(), wanted, missing_tables if is_table else missing_matrices)
            if replaced is not None:
                is_parameter = isinstance(tensor, nn.Parameter)
                value = nn.Parameter(replaced, requires_grad=False) if is_parameter else replaced
                setattr(owner, name, value)
    missing = len(missing_matrices) + len(missing_tables)
    if missing:
        raise ExportError(f"{missing} quantised matrices are no parameters of the model")


def _replace(tensor: Tensor, rounded: dict[str, QuantizedMatrix], missing: set[str]) -> Tensor | None:
    """The tensor with its quantised matrices replaced, which are missing no longer; None without any."""
    if not rounded:
        return None
    found = False
    replaced = tensor.reshape(-1, *tensor.shape[-2:]).clone()
    # The matrices of a stack may be stored as products take them.
    orientations = (replaced.mT, replaced) if tensor.ndim == 3 else (replaced.mT,)
    for matrices in orientations:
        for matrix in matrices:
            key = digest(matrix.numpy())
            if key in rounded:
                matrix.copy_(torch.from_numpy(rounded[key].dequantized()))
                missing.discard(key)
                found = True
    return replaced.reshape(tensor.shape) if found else None

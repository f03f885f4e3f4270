"""Give a torch module the rounded weights of its graph, so that PyTorch is a reference for them."""

from collections.abc import Iterator
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

    A parameter [..., N, K] may hold several matrices. An embedding and an LM head that were one parameter are
    two afterwards. Raises ExportError if a quantised matrix is none of the module's.
    """
    missing = {*rounded.matrices, *rounded.tables}
    for owner in module.modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            # A draft head's embedding is a buffer of this name.
            is_table = isinstance(owner, nn.Embedding) or name == "embed_tokens"
            wanted = rounded.tables if is_table else rounded.matrices
            if not wanted:
                continue
            replaced = tensor.detach().clone()
            found = [key for matrix in _matrices(replaced) if (key := _round(matrix, wanted))]
            if found:
                is_parameter = isinstance(tensor, nn.Parameter)
                value = nn.Parameter(replaced, requires_grad=False) if is_parameter else replaced
                setattr(owner, name, value)
                missing.difference_update(found)
    if missing:
        raise ExportError(f"{len(missing)} quantised matrices are no parameters of the model")


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    """The matrices [N, K] that a graph may have made of a parameter [..., N, K], as views of it."""
    if tensor.ndim == 2:
        yield tensor
        return
    stack = tensor.flatten(0, -3)
    yield from stack
    # Experts side by side: all their outputs, or all their inputs, in one product.
    yield stack.flatten(0, 1)
    yield stack.transpose(0, 1)


def _round(matrix: Tensor, rounded: dict[str, QuantizedMatrix]) -> str | None:
    """Round a matrix [N, K], or [N, E, I] with K = E I, in place if it is one of those quantised."""
    key = digest(matrix.flatten(1).numpy().T)
    if key not in rounded:
        return None
    matrix.copy_(torch.from_numpy(rounded[key].dequantized().T).reshape(matrix.shape))
    return key

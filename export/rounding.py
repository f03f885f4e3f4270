"""Give a torch module the rounded weights of its graph, so that PyTorch is a reference for them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.graphs.quantization import QuantizedMatrix, digest


@torch.no_grad()
def round_parameters(module: nn.Module, rounded: dict[str, QuantizedMatrix]) -> None:
    """Replace every matrix of ``module`` that its graph has quantised by what the graph computes with.

    rounded: matrices [K, N] by the digest of what they were, as ``quantize_products`` returns them
    A parameter [..., N, K] may hold several. An embedding that is also the LM head keeps its values.
    Raises ExportError if a quantised matrix is none of the module's.
    """
    missing = set(rounded)
    for owner in module.modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if tensor.ndim < 2 or not tensor.is_floating_point() or isinstance(owner, nn.Embedding):
                continue
            replaced = tensor.detach().clone()
            found = [key for matrix in _matrices(replaced) if (key := _round(matrix, rounded))]
            if found:
                is_parameter = isinstance(tensor, nn.Parameter)
                setattr(
                    owner, name, nn.Parameter(replaced, requires_grad=False) if is_parameter else replaced
                )
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

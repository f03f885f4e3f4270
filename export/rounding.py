"""Give a torch module the rounded weights of its graph, so that PyTorch is a reference for them."""

import torch
from torch import nn

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
            matrices = tensor.detach().flatten(0, -3) if tensor.ndim > 2 else tensor.detach()[None]
            keys = [digest(matrix.numpy().T) for matrix in matrices]
            if rounded.keys().isdisjoint(keys):
                continue
            replaced = matrices.clone()
            for place, key in enumerate(keys):
                if key in rounded:
                    replaced[place] = torch.from_numpy(rounded[key].dequantized().T)
            replaced = replaced.reshape(tensor.shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(owner, name, nn.Parameter(replaced, requires_grad=False) if is_parameter else replaced)
            missing.difference_update(keys)
    if missing:
        raise ExportError(f"{len(missing)} quantised matrices are no parameters of the model")

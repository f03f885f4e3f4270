"""The features that a draft head reads: hidden states of the target model, and their projection."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import RMSNorm


class FeatureTap:
    """Collects the residual stream after chosen decoder layers during a forward pass."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        self.layer_ids = layer_ids
        self._found: dict[int, Tensor] = {}
        layers = decoder_layers(model)
        self._handles = [layers[i].register_forward_hook(self._hook(i)) for i in layer_ids]

    def _hook(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> Tensor:
        """[B, N, F*H]: the layers' outputs side by side, on the device of the last of them."""
        found = [self._found[i] for i in self.layer_ids]
        if any(layer.device != found[-1].device for layer in found):
            found = [layer.to(found[-1].device) for layer in found]
        return torch.cat(found, dim=-1)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a model of Hugging Face, whatever their list is called (``layers``, ``h``).

    Raises ValueError if the decoder has no list of modules, or several, of ``num_hidden_layers`` entries.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = list(_lists(model.get_decoder(), count))
    if len(found) != 1:
        raise ValueError(
            f"num_hidden_layers: expected one list of {count} layers in the decoder of "
            f"{type(model).__name__}, got {len(found)}"
        )
    return found[0]


def _lists(module: nn.Module, count: int) -> Iterator[nn.ModuleList]:
    """Lists of ``count`` modules, without those inside of others: a layer may have a list of experts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            yield child
        else:
            yield from _lists(child, count)


class ContextProjection(nn.Module):
    """One vector for each context token, made of the hidden states of several layers (EAGLE-3's fusion).

    Every layer's hidden state is normed, all are projected together, and the result is normed.
    """

    def __init__(self, config: DrafterConfig, *, feature_norms: bool = True):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        norms = (RMSNorm(hidden, eps) for _ in config.target_layer_ids)
        self.feature_norms = nn.ModuleList(norms) if feature_norms else None
        self.feature_proj = nn.Linear(config.feature_size, hidden, bias=False)
        self.context_norm = RMSNorm(hidden, eps)

    def forward(self, features: Tensor) -> Tensor:
        """features [B, A, F*H] -> [B, A, H]."""
        if self.feature_norms is not None:
            per_layer = features.chunk(len(self.feature_norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.feature_norms, per_layer, strict=True)]
            features = torch.cat(normed, dim=-1)
        context: Tensor = self.context_norm(self.feature_proj(features))
        return context

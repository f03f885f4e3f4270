"""The keys and values that a draft head keeps of its context."""

from torch import Tensor, cat


class ContextCache:
    """A growing cache of a head's attention layers.

    Every pass adds to it; ``keep`` takes back what was added beyond the context: frames or draft nodes.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """As ``drafters.layers.KeyValueCache``: new keys and values [B, KH, N, D] -> all, [B, KH, S, D]."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            key, value = cat((keys, key), dim=2), cat((values, value), dim=2)
        self._layers[layer] = key, value
        return key, value

    def keep(self, length: int) -> None:
        """Forget what follows the first ``length`` slots."""
        self.length = length
        self._layers = {
            layer: (keys[:, :, :length], values[:, :, :length])
            for layer, (keys, values) in self._layers.items()
        }

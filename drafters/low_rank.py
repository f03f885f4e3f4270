"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685) as a head keeps them in its checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drafters.base_model import check_base_weights
from drafters.config import DrafterConfig, DrafterConfigError
from drafters.upper_layers import ADAPTER


class LowRankAdapter(nn.Module):
    """B A x, which starts as zero."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.A = nn.Linear(inputs, rank, bias=False)
        self.B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        adapted: Tensor = self.B(self.A(x))
        return adapted


def as_adapter(projection: Any) -> LowRankAdapter:
    """The adapter that peft has made for a projection."""
    down, up = projection.lora_A[ADAPTER], projection.lora_B[ADAPTER]
    adapter = LowRankAdapter(down.in_features, up.out_features, down.out_features)
    adapter.A, adapter.B = down, up
    return adapter


def adapters_of(state: Mapping[str, Any]) -> nn.ModuleList:
    """Adapters of the sizes that a checkpoint describes: lora.LAYER.PROJECTION.A.weight and B.weight.

    Raises DrafterConfigError for a checkpoint without adapters, or with a half of one.
    """
    layers: dict[int, dict[str, nn.Module]] = {}
    for name, down in state.items():
        parts = name.split(".")
        if len(parts) == 5 and parts[0] == "lora" and parts[3] == "A":
            up = state.get(name.replace(".A.", ".B."))
            if up is None:
                raise DrafterConfigError(f"{name.replace('.A.', '.B.')} is missing")
            adapter = LowRankAdapter(down.shape[1], up.shape[0], down.shape[0])
            layers.setdefault(int(parts[1]), {})[parts[2]] = adapter
    if not layers:
        raise DrafterConfigError("its adapters, lora.LAYER.PROJECTION.A.weight and B.weight, are missing")
    return nn.ModuleList(nn.ModuleDict(layers[number]) for number in sorted(layers))


def check_model(config: DrafterConfig, model: Any) -> None:
    """Raises DrafterConfigError for a target model that the adapters were not trained for."""
    if model.config.num_hidden_layers != config.base_num_layers:
        raise DrafterConfigError(
            f"base_num_layers must be the target model's {model.config.num_hidden_layers}, "
            f"got {config.base_num_layers}"
        )
    check_base_weights(config, model)


def check_adapters(found: nn.Module, expected: nn.Module) -> None:
    """Raises DrafterConfigError, which names the first weight that differs in shape."""
    own = {name: list(value.shape) for name, value in found.state_dict().items()}
    needed = {name: list(value.shape) for name, value in expected.state_dict().items()}
    for name in sorted(own.keys() | needed.keys()):
        if own.get(name) != needed.get(name):
            wanted = f"must have shape {needed[name]}" if name in needed else "must not be there"
            raise DrafterConfigError(
                f"lora.{name} {wanted} for this target model, got {own.get(name, 'none')}; the head was made "
                "for another one"
            )

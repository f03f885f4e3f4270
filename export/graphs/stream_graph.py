"""What the two graphs with speculative streams have in common."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from drafters.streaming import StreamFrames
from export.graphs.experts import register_experts
from export.graphs.operators import register_attention


class StreamGraph(nn.Module, ABC):
    """A pass in which the streams of a head run through the target model's upper layers.

    context: the positions that are served
    width: labels of a frame
    attention: ``fused``, ``grouped`` or ``primitive``
    """

    def __init__(self, head: StreamFrames, context: int, width: int, attention: str):
        super().__init__()
        self.head = head
        # The head does not own these modules, and the weights of a graph have to be somebody's.
        self.model = head.model
        self.upper_layers = head.upper_layers
        self.context = context
        self.width = width
        self._attention = attention
        if head.transition is not None:
            head.transition.tabulate(head.embed_tokens, head.lm_head)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """Attention and experts take the forms that are exported, whatever the model's are by now."""
        own_experts = self.model.config._experts_implementation
        self.model.set_attn_implementation(register_attention(self._attention))
        self.model.set_experts_implementation(register_experts())
        try:
            return self.run_pass(inputs, past)
        finally:
            self.model.set_experts_implementation(own_experts)

    @abstractmethod
    def run_pass(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the graph's contract, in order."""

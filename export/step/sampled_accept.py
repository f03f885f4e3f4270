"""The sampled accept as an ONNX graph, put together from a beginning, many halvings and an end."""

from dataclasses import fields

import onnx_ir as ir
import torch
from torch import Tensor, nn

from export.graphs.joining import JoinedGraph
from export.graphs.trace import trace
from export.step.accept import accept
from export.step.sampling import (
    BLOCK,
    HALVINGS,
    Nucleus,
    draw,
    halve,
    log_probs_of,
    sample_tokens,
    widest_nucleus,
)
from runtime.core.bundle import GraphSpec, TensorSpec

FILTERS = ("temperature", "top_k", "top_p")
STATE = tuple(field.name for field in fields(Nucleus))


class SampledAcceptGraph(nn.Module):
    """As ``AcceptGraph`` for tokens that are drawn, one uniform number for each place of the path.

    length: P
    A temperature of 0 takes the most probable token.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        uniforms = inputs["uniforms"].gather(1, inputs["depths"])
        filters = (inputs[name] for name in (*FILTERS, "min_p"))
        return self.accepted(inputs, sample_tokens(inputs["logits"], uniforms, *filters))

    def accepted(self, inputs: dict[str, Tensor], choices: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs for the tokens that were drawn, [B, N] int64."""
        found = accept(inputs["input_ids"], inputs["parents"], inputs["ancestors"], choices, self.length)
        places = found.path.clamp(max=choices.shape[1] - 1)
        log_probs = log_probs_of(inputs["logits"], choices).gather(1, places)
        return found.path, found.counts, found.tokens, log_probs


class _Beginning(nn.Module):
    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        nucleus = widest_nucleus(inputs["logits"], *(inputs[name] for name in FILTERS))
        return tuple(vars(nucleus).values())


class _Halving(nn.Module):
    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        nucleus = halve(Nucleus(**{name: inputs[name] for name in STATE}))
        return nucleus.low, nucleus.high


class _End(nn.Module):
    def __init__(self, whole: SampledAcceptGraph):
        super().__init__()
        self.whole = whole

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        uniforms = inputs["uniforms"].gather(1, inputs["depths"])
        nucleus = Nucleus(**{name: inputs[name] for name in STATE})
        filters = (inputs[name] for name in ("temperature", "top_p", "min_p"))
        return self.whole.accepted(inputs, draw(nucleus, inputs["logits"], uniforms, *filters))


def sampled_accept_graph(contract: GraphSpec, length: int) -> ir.Model:
    """The graph of ``SampledAcceptGraph``.

    contract: as ``export.step.contracts.accept_contract`` makes it
    """
    given = {tensor.name: tensor for tensor in contract.inputs}
    blocks = -(-int(given["logits"].shape[2]) // BLOCK)
    wide, one = ("B", "N", blocks, BLOCK), ("B", "N", 1, 1)
    state = [
        TensorSpec(name, wide if name in ("blocks", "scores", "weights") else one, "float32")
        for name in STATE
    ]
    with torch.no_grad():
        beginning = trace(
            _Beginning(),
            GraphSpec((given["logits"], *(given[name] for name in FILTERS)), tuple(state)),
        )
        halving = trace(_Halving(), GraphSpec(tuple(state), tuple(state[-2:])))
        end = trace(_End(SampledAcceptGraph(length)), GraphSpec((*contract.inputs, *state), contract.outputs))
    joined = JoinedGraph(contract)
    values = dict(zip(STATE, joined.append(beginning, joined.inputs), strict=True))
    for _ in range(HALVINGS):
        values["low"], values["high"] = joined.append(halving, values)
    return joined.model(joined.append(end, {**joined.inputs, **values}))

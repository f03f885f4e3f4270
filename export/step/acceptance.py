"""Which tokens the target model chooses on a device, and which path of a verified tree they accept.

Drawn tokens are the same choice as the host's sampler, up to the rounding of float32. A draw is
inverse-transform sampling over the vocabulary in its order, after the filters top_k, top_p and min_p. They
have the rules of the host: tokens that are level with the last one kept are kept too.

Nothing here sorts the vocabulary. Both filters that depend on an order are thresholds on the logits. The
threshold of top_k is one of the largest values. That of the nucleus is found by halving an interval of
logits, because a nucleus may be wider than any number of values that a device can sort. Thresholds apply to
the logits, which have the order of the host's scores; scores in float32 would make tokens level that are not.

Sums over the vocabulary run in blocks: float32 rounds a sum of hundreds of terms by less than 1e-6 of it, but
a running sum of a whole vocabulary by far more.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from runtime.core.bundle import MAX_GRAPH_TOP_K

# About the square root of a vocabulary, so that sums within a block and over blocks are both short.
BLOCK = 256
# Logits that have a weight in float32 span 104 temperatures at most; 2^-32 of that changes no weight.
HALVINGS = 32
# Smaller temperatures choose the same tokens, and may be rounded to 0 by a device.
MIN_TEMPERATURE = 1e-30


def accept(
    input_ids: Tensor, parents: Tensor, ancestors: Tensor, choices: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept every node that the model chose after its parent, if all its ancestors are accepted too.

    input_ids, parents, choices: [B, N] int64; ``choices`` are the tokens that the model chose after each node
    ancestors: [B, N, N] bool, as ``drafters.tree_search.TreeTensors`` has them
    length: P, at least the depth of any node and one
    Returns, all int64, the accepted nodes [B, P], the root first, behind which node i is at place i; how many
    they are [B], hence how many tokens are new; and tokens [B, P], the first of which are the new ones.
    Children of one node have different tokens, so the model chose at most one of them. The accepted nodes are
    therefore one path, and their numbers ascend along it.
    """
    chosen_after_parent = choices.gather(1, parents.clamp(min=0))
    is_root = torch.arange(input_ids.shape[1]) == 0
    agrees = ((parents >= 0) & (chosen_after_parent == input_ids)) | is_root
    disagreements = (ancestors & ~agrees.unsqueeze(1)).long().sum(-1)
    accepted = disagreements == 0  # [B, N]
    counts = accepted.long().sum(-1)
    rank = accepted.long().cumsum(1) - 1
    places = torch.arange(length)
    is_at = accepted.unsqueeze(1) & (rank.unsqueeze(1) == places.view(1, -1, 1))  # [B, P, N]
    nodes = torch.arange(input_ids.shape[1])
    found = torch.where(is_at, nodes, 0).sum(-1)
    on_path = places < counts.unsqueeze(1)
    tokens = torch.where(on_path, choices.gather(1, found), 0)
    return torch.where(on_path, found, places), counts, tokens


@dataclass(frozen=True)
class Nucleus:
    """The search for the logit at which the nucleus ends; K blocks of BLOCK tokens, all float32.

    blocks: [B, N, K, BLOCK], the logits
    scores: [B, N, K, BLOCK], how far they are below the highest one, in temperatures
    weights: [B, N, K, BLOCK], of the tokens within top_k
    needed: [B, N, 1, 1], the weight of a nucleus
    low, high: [B, N, 1, 1]; from ``low`` on there is always enough, and from ``high`` on too little, unless
        the best tokens alone are enough
    """

    blocks: Tensor
    scores: Tensor
    weights: Tensor
    needed: Tensor
    low: Tensor
    high: Tensor


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Draw one token at every node: [B, N] int64.

    logits: [B, N, V] float32; V is fixed when traced, B and N may be open. Minus infinity excludes a token,
        but not all of them may be excluded.
    uniforms: [B, N] float32 in [0, 1)
    temperature: [B] float32; 0 takes the best token, the first of equals
    top_k: [B] int64, at most MAX_GRAPH_TOP_K, which is the caller's to check; 0 is off
    top_p: [B] float32 in (0, 1], the share after top_k; 1 is off
    min_p: [B] float32 in [0, 1]; 0 is off
    """
    nucleus = widest_nucleus(logits, temperature, top_k, top_p)
    for _ in range(HALVINGS):
        nucleus = halve(nucleus)
    return draw(nucleus, logits, uniforms, temperature, top_p, min_p)


def widest_nucleus(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Nucleus:
    """All tokens that top_k leaves; the arguments are those of ``sample_tokens``."""
    warmth = temperature.clamp(min=MIN_TEMPERATURE)[:, None, None, None]
    blocks = _in_blocks(logits)
    highest = blocks.amax((-2, -1), keepdim=True)
    scores = (blocks - highest) / warmth
    within_top_k = blocks >= _top_k_threshold(logits, top_k)[..., None, None]
    weights = torch.where(within_top_k, scores.exp(), 0.0)
    needed = top_p[:, None, None, None] * _total(weights)
    low = torch.where(weights > 0, blocks, highest).amin((-2, -1), keepdim=True)
    return Nucleus(blocks, scores, weights, needed, low, highest)


def halve(nucleus: Nucleus) -> Nucleus:
    """The same with half the interval from ``low`` to ``high``.

    After ``HALVINGS`` times no other logit of float32 lies between them, or none whose weight would differ,
    so all tokens that are level are on the same side.
    """
    middle = (nucleus.low + nucleus.high) / 2
    enough = _suffices(nucleus, middle)
    low, high = torch.where(enough, middle, nucleus.low), torch.where(enough, nucleus.high, middle)
    return replace(nucleus, low=low, high=high)


def draw(
    nucleus: Nucleus, logits: Tensor, uniforms: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """One token of every nucleus, [B, N] int64; the arguments are those of ``sample_tokens``."""
    end = torch.where(_suffices(nucleus, nucleus.high), nucleus.high, nucleus.low)
    in_nucleus = nucleus.blocks >= torch.where(top_p[:, None, None, None] < 1, end, -torch.inf)
    # The logarithm of 0 excludes nothing.
    likely = nucleus.scores >= min_p.log()[:, None, None, None]
    drawn = _inverse_transform(torch.where(in_nucleus & likely, nucleus.weights, 0.0), uniforms)
    return torch.where((temperature == 0)[:, None], logits.argmax(-1), drawn)


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The model's own log-probabilities of the tokens: log softmax of the logits at temperature 1.

    logits: [B, N, V] float32; tokens: [B, N] int64; returns [B, N] float32
    """
    blocks = _in_blocks(logits)
    highest = blocks.amax((-2, -1), keepdim=True)
    chosen = logits.gather(-1, tokens[..., None])
    # The two differences are small where the probability is large, which keeps its logarithm precise.
    return ((chosen[..., None] - highest) - _total((blocks - highest).exp()).log())[..., 0, 0]


def _in_blocks(logits: Tensor) -> Tensor:
    """[B, N, V] to [B, N, ceil(V / BLOCK), BLOCK], filled up with minus infinity."""
    num_blocks = -(-logits.shape[-1] // BLOCK)
    missing = num_blocks * BLOCK - logits.shape[-1]
    return functional.pad(logits, (0, missing), value=-torch.inf).unflatten(-1, (num_blocks, BLOCK))


def _total(weights: Tensor) -> Tensor:
    """[B, N, K, BLOCK] to [B, N, 1, 1]"""
    return weights.sum(-1, keepdim=True).sum(-2, keepdim=True)


def _top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest logit [B, N]; minus infinity where k is 0."""
    most = min(MAX_GRAPH_TOP_K, logits.shape[-1])
    largest = logits.topk(most, -1).values
    index = (top_k.clamp(1, most) - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    return torch.where((top_k > 0)[:, None], largest.gather(-1, index)[..., 0], -torch.inf)


def _suffices(nucleus: Nucleus, threshold: Tensor) -> Tensor:
    """Whether the tokens from ``threshold`` on weigh enough: [B, N, 1, 1]."""
    weights = torch.where(nucleus.blocks >= threshold, nucleus.weights, 0.0)
    return _total(weights) >= nucleus.needed


def _inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative weight exceeds the share ``uniforms`` of the whole: [B, N].

    weights: [B, N, K, BLOCK]; uniforms: [B, N]
    First the block is found, then the token in it, so that no cumulative sum of the vocabulary is needed.
    """
    sums = weights.sum(-1)
    cumulative = sums.cumsum(-1)
    target = uniforms[..., None] * cumulative[..., -1:]
    block = first_above(sums, cumulative, target)
    before = functional.pad(cumulative, (1, 0)).gather(-1, block)
    chosen = weights.gather(2, block[..., None].expand(-1, -1, 1, BLOCK))[:, :, 0]
    token = first_above(chosen, chosen.cumsum(-1), target - before)
    return (block * BLOCK + token)[..., 0]


def first_above(weights: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index with a weight whose cumulative weight [..., C] exceeds the target: [..., 1].

    The last index with a weight, where rounding lets none exceed it. Devices may sum in parallel, so that
    cumulative weights differ in rounding where a weight is 0; such an index is never taken.
    """
    indices = torch.arange(weights.shape[-1])
    last = torch.where(weights > 0, indices, 0).amax(-1, keepdim=True)
    return torch.where((weights > 0) & (cumulative > target), indices, last).amin(-1, keepdim=True)

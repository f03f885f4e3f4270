"""How a frame's distribution depends on the last label emitted before it.

The frames of a parallel head are independent given the context, so drafts mix modes: "of problem",
"no course". A transition adds D(t, y, k) to the logit of label k at frame t after label y:

    D(t, y, k) = state(t, y) . right(k)
    markov   state = W_y e(y)                        the same at every frame
    mlp      state = silu(W_h h_t + W_y e(y) + c)    of the frame's hidden state too
    right(k) = W_2' W_k lm_head(k)                   W_2, the MLP's second layer, only for mlp

and of the blank, a vector of its own in place of W_k lm_head(k)
(low-rank Markov heads as in DSpark, arXiv 2607.05147; an MLP on hidden state and previous token as in
TreeFlash, arXiv 2606.03819). D is zero outside a frame's best ``num_candidates`` labels and the blank,
so that the normaliser is exact without a pass over the vocabulary for every previous label:

    log p_t(k | y) = u_t(k) + D(t, y, k) - log(rest_t + sum over candidates c of exp(u_t(c) + D(t, y, c)))

where u_t are the frame's own log-probabilities and rest_t is their mass outside the candidates.
What depends on labels alone is tabulated once for decoding: the graph looks up vectors, and the search
(``runtime.core.prefix_search``) computes D for the few labels that it reaches, over the best of the
candidates; the other candidates are not moved.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig


class Transition(nn.Module):
    """The parameters of D. Shapes: R anchors, T frames, P previous labels, r the transition's size."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.transition_size
        self.previous = nn.Linear(hidden, size, bias=config.transition == "mlp")
        self.label = nn.Linear(hidden, size, bias=False)
        self.blank = nn.Parameter(torch.zeros(size)) if config.has_blank else None
        self.frame = self.mix = None
        if config.transition == "mlp":
            self.frame = nn.Linear(hidden, size, bias=False)
            self.mix = nn.Linear(size, size, bias=False)
        self._tables: tuple[Tensor, Tensor] | None = None
        # An untrained transition is zero.
        nn.init.zeros_(self.previous.weight if self.mix is None else self.mix.weight)

    def state(self, hidden: Tensor, previous_ids: Tensor, embed_tokens: Tensor) -> Tensor:
        """hidden [R, T, H], labels [R, P] int64, the embedding [V, H] -> [R, T, P, r]."""
        previous = self.of_previous(previous_ids, embed_tokens).unsqueeze(1)  # [R, 1, P, r]
        frames = self.of_frames(hidden)
        if frames is None:
            return previous.expand(-1, hidden.shape[1], -1, -1)
        return F.silu(frames.unsqueeze(2) + previous)

    def of_frames(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, T, H] -> [R, T, r], the frames' part of the state; None for ``markov``."""
        return None if self.frame is None else self.frame(hidden)

    def of_previous(self, label_ids: Tensor, embed_tokens: Tensor) -> Tensor:
        """labels [...] int64 -> [..., r], their part of the state."""
        if self._tables is not None:
            return F.embedding(label_ids, self._tables[0])
        return self.of_embedded(F.embedding(label_ids, embed_tokens))

    def of_embedded(self, embedded: Tensor) -> Tensor:
        """The same of labels' embeddings, [..., H] -> [..., r]."""
        part: Tensor = self.previous(embedded)
        return part

    def of_following(self, label_ids: Tensor, lm_head: Tensor) -> Tensor:
        """labels [..., K] int64 -> [..., K, r], or with a blank [..., K + 1, r], its vector last."""
        table = self._following(lm_head) if self._tables is None else self._tables[1]
        if self.blank is not None:
            label_ids = F.pad(label_ids, (0, 1), value=lm_head.shape[0])
        return F.embedding(label_ids, table)

    def right(self, lm_head: Tensor) -> Tensor:
        """lm_head [V, H] -> [V, r]: every label's vector."""
        return self._mixed(self.label(lm_head))

    def blank_vector(self) -> Tensor | None:
        """[r], or None for a head without blanks."""
        return None if self.blank is None else self._mixed(self.blank)

    def _mixed(self, vectors: Tensor) -> Tensor:
        return vectors if self.mix is None else vectors @ self.mix.weight

    def _following(self, lm_head: Tensor) -> Tensor:
        """[V, r], with a blank [V + 1, r], its vector last."""
        right, blank = self.right(lm_head), self.blank_vector()
        return right if blank is None else torch.cat((right, blank.unsqueeze(0)))

    @torch.no_grad()
    def tabulate(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Compute the tables of all labels once. The head must not be trained after this."""
        self._tables = (self.previous(embed_tokens), self._following(lm_head))


def normaliser(
    top_logp: Tensor, top_delta: Tensor, blank_logp: Tensor | None, blank_delta: Tensor | None
) -> Tensor:
    """Logarithm of the total mass after the candidates have moved, [R, T, P].

    top_logp [R, T, K], top_delta [R, T, P, K]; blank_logp [R, T], blank_delta [R, T, P].
    """
    top = top_logp.exp()
    rest = 1 - top.sum(-1)
    moved = torch.einsum("rtk,rtpk->rtp", top, top_delta.exp())
    if blank_logp is not None and blank_delta is not None:
        blank = blank_logp.exp()
        rest = rest - blank
        moved = moved + blank.unsqueeze(-1) * blank_delta.exp()
    # Where D pushes all candidates down and nothing is outside them, the sum can round to zero.
    total = rest.clamp(min=0).unsqueeze(-1) + moved
    return total.clamp(min=torch.finfo(total.dtype).tiny).log()

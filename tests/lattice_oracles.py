"""Tiny lattices, and the probabilities of all their prefixes by brute force."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from runtime.core.lattice import Lattice, Transition

ROOT = 7
BLANK, REST = -1, -2
Prefix = tuple[int, ...]


def make_lattice(
    tokens: Sequence[Sequence[int]], probs: Sequence[Sequence[float]], blanks: Sequence[float]
) -> Lattice:
    with np.errstate(divide="ignore"):
        return Lattice(
            np.array(tokens, np.int64),
            np.log(np.array(probs)).astype(np.float32),
            np.log(np.array(blanks)).astype(np.float32),
        )


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    """Up to 4 frames of up to 3 labels, shared between frames; some mass may be outside the lattice."""
    num_frames = draw(st.integers(1, 4))
    width = draw(st.integers(1, 3))
    vocabulary = list(range(5, 5 + width + draw(st.integers(0, 2))))
    tokens, probs, blanks = [], [], []
    for _ in range(num_frames):
        # Small integers make ties and zeros; the last two weights are the blank's and the dropped mass.
        weights = draw(st.lists(st.integers(0, 9), min_size=width + 2, max_size=width + 2).filter(any))
        tokens.append(draw(st.permutations(vocabulary))[:width])
        probs.append(sorted((weight / sum(weights) for weight in weights[:width]), reverse=True))
        blanks.append(weights[width] / sum(weights))
    return make_lattice(tokens, probs, blanks)


def brute_force(lattice: Lattice) -> dict[Prefix, float]:
    """The probability of every possible prefix, added up path by path.

    REST stands for what a frame's lattice leaves out: a prefix cannot go on through it, but may end
    before it.
    """
    frames = []
    for tokens, logprobs, blank in zip(
        lattice.frame_tokens, lattice.frame_logprobs, lattice.blank_logprobs, strict=True
    ):
        outcomes = [(int(t), math.exp(p)) for t, p in zip(tokens, logprobs, strict=True)]
        outcomes.append((BLANK, math.exp(blank)))
        outcomes.append((REST, 1.0 - sum(p for _, p in outcomes)))
        frames.append(outcomes)
    totals: dict[Prefix, float] = defaultdict(float)
    for path in itertools.product(*frames):
        probability = math.prod(p for _, p in path)
        if not probability:
            continue
        known = itertools.takewhile(lambda label: label != REST, (label for label, _ in path))
        labels = [label for label, _ in itertools.groupby(known) if label != BLANK]
        for length in range(1, len(labels) + 1):
            totals[tuple(labels[:length])] += probability
    return {prefix: total for prefix, total in totals.items() if total > 0}


@st.composite
def unmerged_lattices(draw: st.DrawFn) -> Lattice:
    """Repeats do not merge; with or without blanks and a transition, which may be of the frames or not."""
    lattice = draw(lattices())
    num_frames = len(lattice.frame_tokens)
    lattice = dataclasses.replace(lattice, merges_repeats=False)
    has_blank = draw(st.booleans())
    if not has_blank:
        lattice = dataclasses.replace(lattice, blank_logprobs=np.full_like(lattice.blank_logprobs, -np.inf))
    if draw(st.booleans()):
        return lattice
    size = draw(st.integers(1, 3))
    # A row for every label, the root and the blank; products of halves are exact.
    values = st.lists(st.integers(-4, 4), min_size=size, max_size=size)
    labels = [ROOT, BLANK, *np.unique(lattice.frame_tokens).tolist()]
    previous, following = ({label: np.array(draw(values)) / 2 for label in labels} for _ in range(2))
    rows = lattice.frame_tokens.tolist()
    ends = [BLANK] if has_blank else []
    frames = [draw(values) for _ in range(num_frames)] if draw(st.booleans()) else [[]] * num_frames
    return dataclasses.replace(
        lattice,
        transition=Transition(
            frames=np.array(frames, np.float32) / 2,
            root=previous[ROOT].astype(np.float32),
            previous=np.array([[previous[k] for k in row] for row in rows], np.float32),
            following=np.array([[following[k] for k in (*row, *ends)] for row in rows], np.float32),
        ),
    )


def frames_after(lattice: Lattice, last: int | None) -> list[tuple[dict[int, float], float]]:
    """Every frame's probabilities of its labels, and of the blank, after a label or, None, the root."""
    transition = lattice.transition
    row = transition.root
    if last is not None and row.size:
        row = transition.previous[lattice.frame_tokens == last][0]
    found = []
    for frame, tokens in enumerate(lattice.frame_tokens):
        own = np.exp([*lattice.frame_logprobs[frame], lattice.blank_logprobs[frame]])
        outside = 1 - own.sum()
        if row.size:
            hidden = row.astype(np.float64)
            if transition.frames.size:
                hidden = hidden + transition.frames[frame]
                hidden = hidden / (1 + np.exp(-hidden))
            moved = transition.following[frame] @ hidden
            own[: moved.size] *= np.exp(moved)
            own /= own.sum() + outside
        found.append((dict(zip(tokens.tolist(), own[:-1], strict=True)), own[-1]))
    return found


def walk_unmerged(lattice: Lattice, *, with_blanks: bool = True) -> dict[Prefix, float]:
    """The probability of every prefix where each frame emits a label or a blank, path by path."""
    totals: dict[Prefix, float] = defaultdict(float)
    after = {label: frames_after(lattice, label) for label in {None, *lattice.frame_tokens.ravel().tolist()}}

    def walk(frame: int, prefix: Prefix, probability: float) -> None:
        if frame == len(lattice.frame_tokens):
            return
        probs, blank = after[prefix[-1] if prefix else None][frame]
        for token, prob in probs.items():
            totals[*prefix, token] += probability * prob
            walk(frame + 1, (*prefix, token), probability * prob)
        if with_blanks:
            walk(frame + 1, prefix, probability * blank)

    walk(0, (), 1.0)
    return {prefix: total for prefix, total in totals.items() if total > 0}

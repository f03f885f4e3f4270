"""The doubt in a draft head: Bayes' rule, and what goes from text to text."""

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.decode.budget import PastTexts
from runtime.decode.budget_rules import (
    DEFAULT_CONSTANTS,
    KNOWN,
    BudgetConstants,
    follow_first_drafts,
    forget_doubt,
)
from runtime.decode.step_costs import as_record


class Text:
    """The doubt in a text."""

    def __init__(self, constants: BudgetConstants = DEFAULT_CONSTANTS, past: PastTexts | None = None):
        self._past = past or PastTexts(constants)
        self._state = np.zeros(1, KNOWN)
        self._state["doubt"] = self._past.first_doubt(constants)
        self._state["constants"] = as_record(constants)

    @property
    def trust(self) -> float:
        return 1 - float(self._state["doubt"][0])

    def follow(self, first: Sequence[float], are_right: Sequence[bool]) -> None:
        follow_first_drafts(self._state[0], np.array(first), np.array(are_right))

    def end_step(self) -> None:
        forget_doubt(self._state[0], self._past.state[0])


def test_the_trust_in_a_head_follows_bayes_rule() -> None:
    """Against the product of all likelihoods; after few right drafts a head is trusted again."""
    constants = BudgetConstants(usual_doubt=0.3)
    text = Text(constants)
    text.follow([0.9, 0.5], [False, True])
    text.follow([0.0, 1.0, 0.2], [False, True, False])
    useless = constants.useless_acceptance
    # No draft is believed to be less probable than one of a useless head.
    right = 0.7 * (0.1 * 0.5 * (1 - useless) * 0.99 * 0.8)
    wrong = 0.3 * useless**2 * (1 - useless) ** 3
    assert text.trust == pytest.approx(right / (right + wrong))

    text = Text()
    for _ in range(100):
        text.follow([0.95], [False])
        text.end_step()
    assert text.trust < 0.01
    for _ in range(3):
        text.follow([0.95], [True])
        text.end_step()
    assert text.trust > 0.9


def test_doubt_goes_while_nothing_is_drafted_and_is_carried_to_the_next_text() -> None:
    past = PastTexts()
    text = Text(past=past)
    for _ in range(500):
        text.follow([0.9], [False])
        text.end_step()
    constants = DEFAULT_CONSTANTS
    assert Text(past=past).trust == pytest.approx(1 - constants.max_doubt)
    assert Text().trust == pytest.approx(1 - constants.usual_doubt)
    before = text.trust
    for _ in range(2000):
        text.end_step()
    assert before < 0.01
    assert text.trust == pytest.approx(1 - constants.usual_doubt, abs=0.01)
    assert Text(past=past).trust == pytest.approx(text.trust, abs=0.02)

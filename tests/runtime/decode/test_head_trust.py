"""The doubt in a draft head: Bayes' rule, and what goes from text to text."""

import numpy as np
import pytest

from runtime.decode.head_trust import DEFAULT_TRUST, HeadTrust, PastTexts, TrustConstants


def test_the_trust_in_a_head_follows_bayes_rule() -> None:
    """Against the product of all likelihoods; after few right drafts a head is trusted again."""
    constants = TrustConstants(usual_doubt=0.3)
    first = np.array([0.9, 0.5, 0.0, 1.0, 0.2])
    are_right = np.array([False, True, False, True, False])
    trust = HeadTrust(constants)
    trust.follow(first[:2], are_right[:2])
    trust.follow(first[2:], are_right[2:])
    useless = constants.useless_acceptance
    right, wrong = 0.7 * (0.1 * 0.5 * 0.98 * 0.99 * 0.8), 0.3 * useless**2 * (1 - useless) ** 3
    assert trust.probability == pytest.approx(right / (right + wrong))

    trust = HeadTrust()
    for _ in range(100):
        trust.follow(np.array([0.95]), np.array([False]))
        trust.end_step()
    assert trust.probability < 0.01
    for _ in range(3):
        trust.follow(np.array([0.95]), np.array([True]))
        trust.end_step()
    assert trust.probability > 0.9


def test_doubt_goes_while_nothing_is_drafted_and_is_carried_to_the_next_text() -> None:
    past = PastTexts()
    trust = HeadTrust(past=past)
    for _ in range(500):
        trust.follow(np.array([0.9]), np.array([False]))
        trust.end_step()
    constants = DEFAULT_TRUST
    assert HeadTrust(past=past).probability == pytest.approx(1 - constants.max_doubt)
    assert HeadTrust().probability == pytest.approx(1 - constants.usual_doubt)
    before = trust.probability
    for _ in range(2000):
        trust.end_step()
    assert before < 0.01
    assert trust.probability == pytest.approx(1 - constants.usual_doubt, abs=0.01)
    assert HeadTrust(past=past).probability == pytest.approx(trust.probability, abs=0.02)

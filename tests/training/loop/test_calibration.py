"""Fitting the two-parameter map from prefix probability to acceptance probability."""

import numpy as np
import pytest

from runtime.core.calibration import calibrate
from training.loop.evaluation import MIN_SLOPE, fit_calibration
from training.settings import TrainingError

# Of a fit to 20,000 draws: several standard errors.
SAMPLING = 0.08


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.55, -0.7), (1.6, 0.9)])
def test_fit_finds_a_miscalibrated_head(a: float, b: float) -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.beta(0.6, 2.0, 20_000)
    accepted = rng.random(probabilities.size) < calibrate(probabilities, a, b)
    fitted = fit_calibration(probabilities, accepted)
    assert fitted == pytest.approx((a, b), abs=SAMPLING)
    # With an intercept the fitted probabilities sum to the acceptances.
    assert calibrate(probabilities, *fitted).sum() == pytest.approx(accepted.sum(), rel=1e-4)


@pytest.mark.parametrize(
    "accepted", [[False] * 4, [True] * 4, [False, False, True, True], [False, True, False, True]]
)
def test_fit_is_finite_where_likelihood_has_no_maximum(accepted: list[bool]) -> None:
    a, b = fit_calibration([0.1, 0.2, 0.7, 0.8], accepted)
    assert np.isfinite([a, b]).all()
    assert a >= MIN_SLOPE


def test_order_is_kept_where_acceptance_falls_with_probability() -> None:
    probabilities = np.array([0.1, 0.2, 0.8, 0.9] * 10)
    a, b = fit_calibration(probabilities, probabilities < 0.5)
    assert a == MIN_SLOPE
    assert calibrate(probabilities, a, b) == pytest.approx(np.full(40, 0.5), abs=0.01)


@pytest.mark.parametrize(
    ("probabilities", "accepted"), [([], []), ([0.5], [True, False]), ([[0.5]], [[True]])]
)
def test_nothing_to_fit(probabilities: list[float], accepted: list[bool]) -> None:
    with pytest.raises(TrainingError, match="two lists of one length"):
        fit_calibration(probabilities, accepted)

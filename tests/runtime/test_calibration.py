"""The two-parameter map from stated to measured acceptance."""

import numpy as np
import pytest

from runtime.calibration import MIN_SLOPE, calibrate, fit_calibration, inverse
from runtime.errors import UserError

# Of a fit to 20,000 draws: several standard errors.
SAMPLING = 0.08


def test_docstring_examples() -> None:
    assert calibrate(0.2, 2, 0) == pytest.approx(1 / 17)
    assert inverse(2, 1) == (0.5, -0.5)


def test_identity_and_edges() -> None:
    psi = np.array([0.0, 1e-6, 0.3, 1.0, 1.0 + 1e-15])
    assert calibrate(psi, 1, 0) == pytest.approx([0, 1e-6, 0.3, 1, 1], abs=1e-8)
    found = calibrate(psi, 1.7, -0.4)
    assert np.all(np.isfinite(np.log(found)))
    assert np.all(np.diff(found) >= 0)


def test_inverse_takes_back() -> None:
    psi = np.array([[0.001, 0.5], [0.2, 0.97]])
    assert calibrate(calibrate(psi, 0.6, -1.1), *inverse(0.6, -1.1)) == pytest.approx(psi)


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.55, -0.7), (1.6, 0.9)])
def test_fit_finds_a_miscalibrated_head(a: float, b: float) -> None:
    rng = np.random.default_rng(0)
    psi = rng.beta(0.6, 2.0, 20_000)
    accepted = rng.random(psi.size) < calibrate(psi, a, b)
    fitted = fit_calibration(psi, accepted)
    assert fitted == pytest.approx((a, b), abs=SAMPLING)
    # With an intercept the fitted probabilities sum to the acceptances.
    assert calibrate(psi, *fitted).sum() == pytest.approx(accepted.sum(), rel=1e-4)


@pytest.mark.parametrize(
    "accepted", [[False] * 4, [True] * 4, [False, False, True, True], [False, True, False, True]]
)
def test_fit_is_finite_where_likelihood_has_no_maximum(accepted: list[bool]) -> None:
    a, b = fit_calibration([0.1, 0.2, 0.7, 0.8], accepted)
    assert np.isfinite([a, b]).all()
    assert a >= MIN_SLOPE


def test_order_is_kept_where_acceptance_falls_with_psi() -> None:
    psi = np.array([0.1, 0.2, 0.8, 0.9] * 10)
    a, b = fit_calibration(psi, psi < 0.5)
    assert a == MIN_SLOPE
    assert calibrate(psi, a, b) == pytest.approx(np.full(40, 0.5), abs=0.01)


@pytest.mark.parametrize(("psi", "accepted"), [([], []), ([0.5], [True, False]), ([[0.5]], [[True]])])
def test_nothing_to_fit(psi: list[float], accepted: list[bool]) -> None:
    with pytest.raises(UserError, match="two lists of one length"):
        fit_calibration(psi, accepted)

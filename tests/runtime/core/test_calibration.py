"""The two-parameter map from prefix probabilities to acceptance probabilities."""

import numpy as np
import pytest

from runtime.core.calibration import MAX_SHIFT, RunningCalibration, calibrate


def test_docstring_examples() -> None:
    assert calibrate(0.2, 2, 0) == pytest.approx(1 / 17)


def test_identity_and_edges() -> None:
    psi = np.array([0.0, 1e-6, 0.3, 1.0, 1.0 + 1e-15])
    assert calibrate(psi, 1, 0) == pytest.approx([0, 1e-6, 0.3, 1, 1], abs=1e-8)
    found = calibrate(psi, 1.7, -0.4)
    assert np.all(np.isfinite(np.log(found)))
    assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize(("a", "b"), [(1.0, 2.0), (1.0, -2.0), (0.6, 0.0)])
def test_running_calibration_finds_the_text(a: float, b: float) -> None:
    """Fitted to (a, 0), on a text whose acceptances follow (a, b): what is expected comes close."""
    rng = np.random.default_rng(0)
    running = RunningCalibration(a, 0.0)
    expected, measured = [], []
    for _ in range(400):
        psi = rng.beta(0.6, 1.0, 8)
        accepted = rng.random(8) < calibrate(psi, a, b)
        predicted = running.predict(psi)
        expected.append(predicted.sum())
        measured.append(np.count_nonzero(accepted))
        running.update(predicted, measured[-1])
    assert sum(expected[50:]) == pytest.approx(sum(measured[50:]), rel=0.05)
    assert running.b == pytest.approx(b, abs=0.5)


def test_a_surprise_moves_it_by_a_bounded_step() -> None:
    running = RunningCalibration(1.0, 0.0)
    for _ in range(3):
        before = running.b
        running.update(np.full(80, 1e-9), 80)
        assert running.b - before == MAX_SHIFT
    running.update(np.full(80, 1 - 1e-9), 0)
    assert running.b == 2 * MAX_SHIFT

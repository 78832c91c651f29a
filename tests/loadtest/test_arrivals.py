"""Arrival processes have the rate and the burstiness that they were asked for, and repeat for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.loadtest.arrivals import BadArrivals, ClosedLoop, constant, daily, gamma, poisson, replay


@settings(max_examples=25)
@given(rate=st.floats(0.1, 1000), burstiness=st.floats(0.2, 20), seed=st.integers(0, 2**31))
def test_gamma_has_its_rate_and_its_variation(rate: float, burstiness: float, seed: int) -> None:
    n = 20_000
    times = gamma(n, rate, burstiness, np.random.default_rng(seed)).times_s
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    spread = 1 / np.sqrt(burstiness)  # coefficient of variation of the gaps
    assert gaps.mean() * rate == pytest.approx(1.0, abs=6 * spread / np.sqrt(n))
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.2)


def test_poisson_is_memoryless() -> None:
    times = poisson(50_000, 10.0, np.random.default_rng(1)).times_s
    counts = np.histogram(times, bins=np.arange(0, times[-1], 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)  # as many come in a second as Poisson says


def test_constant_and_all_at_once() -> None:
    assert constant(5, 2.0).times_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert constant(3, float("inf")).times_s.tolist() == [0.0, 0.0, 0.0]


def test_replay_starts_at_zero_and_may_run_faster() -> None:
    assert replay(np.array([105.0, 100.0, 120.0]), speed=2.0).times_s.tolist() == [0.0, 2.5, 10.0]


def test_a_day_has_its_low_at_its_start_and_its_mean_rate() -> None:
    times = daily(100_000, 50.0, 0.8, 1000.0, np.random.default_rng(2)).times_s
    whole_days = times[times < 1000.0 * (times[-1] // 1000.0)]
    counts = np.histogram(whole_days % 1000.0, bins=10)[0]
    assert counts.argmin() in (0, 9)
    assert counts.argmax() in (4, 5)
    assert counts.max() / counts.min() > 4
    assert len(whole_days) / (times[-1] // 1000.0 * 1000.0) == pytest.approx(50.0, rel=0.03)


def test_same_seed_same_times() -> None:
    assert (
        poisson(9, 3.0, np.random.default_rng(5)).times_s == poisson(9, 3.0, np.random.default_rng(5)).times_s
    ).all()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: gamma(1, 0.0, 1.0, np.random.default_rng(0)), "rate"),
        (lambda: gamma(1, 1.0, -1.0, np.random.default_rng(0)), "burstiness"),
        (lambda: constant(1, 0.0), "rate"),
        (lambda: replay(np.zeros(1), 0.0), "speed"),
        (lambda: ClosedLoop(0), "num_users"),
        (lambda: ClosedLoop(1, -1.0), "think_s"),
        (lambda: daily(1, 1.0, 2.0, 1.0, np.random.default_rng(0)), "swing"),
    ],
)
def test_bad_values_are_named(make, field: str) -> None:
    with pytest.raises(BadArrivals, match=field):
        make()

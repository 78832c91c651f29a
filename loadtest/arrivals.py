"""When requests are sent: in an open loop (times drawn beforehand) or a closed one (users who wait for answers)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class BadArrivals(ValueError):
    """An arrival process that cannot be: the message names the field and the number."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`num_users` users, each with one request in flight; the next one follows `think_s` after the last answer."""

    num_users: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_users < 1:
            raise BadArrivals(f"num_users must be at least 1, got {self.num_users}")
        if self.think_s < 0:
            raise BadArrivals(f"think_s must not be negative, got {self.think_s}")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Seconds since the start at which each request is sent, ascending."""

    times_s: Times


Arrivals = ClosedLoop | OpenLoop


def gamma(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> OpenLoop:
    """Gaps from a gamma distribution of shape `burstiness` and mean 1 / rate.

    1 is a Poisson process; below 1 is burstier (squared coefficient of variation of the gaps is 1 / burstiness);
    towards infinity the gaps become constant. The same parameter as in vLLM's generator.
    """
    _positive("rate", rate)
    _positive("burstiness", burstiness)
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=num_requests)
    return OpenLoop(np.cumsum(gaps))


def poisson(num_requests: int, rate: float, rng: np.random.Generator) -> OpenLoop:
    """Memoryless arrivals, `rate` a second on average."""
    return gamma(num_requests, rate, 1.0, rng)


def constant(num_requests: int, rate: float) -> OpenLoop:
    """One request every 1 / rate seconds, the first at 0; an infinite rate sends all at once."""
    if not rate > 0:
        raise BadArrivals(f"rate must be above 0, got {rate}")
    return OpenLoop(np.arange(num_requests, dtype=np.float64) / rate)


def replay(times_s: Times, speed: float = 1.0) -> OpenLoop:
    """The timestamps of a trace, counted from its first row, `speed` times as fast."""
    _positive("speed", speed)
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    return OpenLoop((ordered - ordered[:1]) / speed)


def daily(num_requests: int, mean_rate: float, swing: float, period_s: float, rng: np.random.Generator) -> OpenLoop:
    """A Poisson process whose rate is mean_rate * (1 - swing * cos(2 pi t / period)): a day that starts at its low.

    By time change: a unit-rate process mapped through the inverse of the integrated rate (tabulated).
    """
    _positive("mean_rate", mean_rate)
    _positive("period_s", period_s)
    if not 0 <= swing <= 1:
        raise BadArrivals(f"swing must lie in 0..1, got {swing}")
    marks = np.cumsum(rng.exponential(1.0, num_requests))
    horizon = 1.5 * marks[-1] / mean_rate + period_s if num_requests else period_s
    grid = np.linspace(0.0, horizon, max(1000, int(horizon / period_s * 1000)))
    turn = 2 * np.pi / period_s
    return OpenLoop(np.interp(marks, mean_rate * (grid - swing * np.sin(turn * grid) / turn), grid))


def _positive(name: str, value: float) -> None:
    if not (value > 0 and np.isfinite(value)):
        raise BadArrivals(f"{name} must be a finite number above 0, got {value}")

"""Counters and histograms as plain numbers: cheap to add to, small to send, summed wherever they meet.

A router keeps those of its requests and sends what was added about once a second; the scheduler adds them up, with
its own of the steps. So whichever router is asked tells the figures of all, and a router that dies takes at most the
last second along.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left

import msgspec

logger = logging.getLogger(__name__)

Labels = tuple[str, ...]

_REQUEST_S: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
_REQUEST_S += (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_S: tuple[float, ...] = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075)
_TOKEN_S += (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_PLAN_S = (1e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TOKENS = tuple(float(2**i) for i in range(16))

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"
LATENCY = "vllm:e2e_request_latency_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
TENANT_QUEUE_TIME = "orcaserve:queue_wait_seconds"
STEP_TIME = "orcaserve:step_seconds"
STEP_TOKENS = "orcaserve:step_tokens"
PLAN_TIME = "orcaserve:plan_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
SUCCESS = "vllm:request_success"
REFUSED = "orcaserve:requests_refused"
HTTP_REQUESTS = "orcaserve:http_requests"

# Upper bounds of the buckets; one more goes up to infinity.
BOUNDS: dict[str, tuple[float, ...]] = {
    FIRST_TOKEN: _REQUEST_S,
    INTER_TOKEN: _TOKEN_S,
    LATENCY: _REQUEST_S,
    QUEUE_TIME: _REQUEST_S,
    TENANT_QUEUE_TIME: _REQUEST_S,
    STEP_TIME: _TOKEN_S,
    STEP_TOKENS: _TOKENS,
    PLAN_TIME: _PLAN_S,
}


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """A histogram on its way: how many observations each bucket holds (not cumulative), and the sum of them all."""

    counts: list[int]
    total: float

    def minus(self, earlier: Buckets) -> Buckets:
        """What came since."""
        counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Buckets(counts, self.total - earlier.total)


class FigureSet(msgspec.Struct, frozen=True, array_like=True):
    """Figures at one moment, or what was added to them: by name and labels."""

    counters: dict[str, dict[Labels, float]]
    histograms: dict[str, dict[Labels, Buckets]]


class Histogram:
    """Adding an observation costs a third of a microsecond."""

    __slots__ = ("_complained", "_name", "bounds", "counts", "total")

    def __init__(self, name: str) -> None:
        self.bounds = BOUNDS[name]
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self._name = name
        self._complained = False

    def observe(self, value: float) -> None:
        if not 0.0 <= value < math.inf:
            if not self._complained:
                self._complained = True
                logger.error("%s was given %r; it counts as 0, and so will others like it", self._name, value)
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> Buckets:
        return Buckets(list(self.counts), self.total)

    def add(self, buckets: Buckets) -> None:
        for place, count in enumerate(buckets.counts):
            self.counts[place] += count
        self.total += buckets.total


class Figures:
    """All figures of one process. What makes no sense (negative, not a number) counts as 0 and is logged once."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._complained: set[str] = set()

    def histogram(self, name: str, labels: Labels = ()) -> Histogram:
        """The one of this name, to be kept where it is fed often."""
        family = self._histograms.setdefault(name, {})
        if (found := family.get(labels)) is None:
            found = family[labels] = Histogram(name)
        return found

    def count(self, name: str, amount: float = 1.0, labels: Labels = ()) -> None:
        if not 0.0 <= amount < math.inf:
            if name not in self._complained:
                self._complained.add(name)
                logger.error("%s was given %r; it counts as 0, and so will others like it", name, amount)
            amount = 0.0
        family = self._counters.setdefault(name, {})
        family[labels] = family.get(labels, 0.0) + amount

    def snapshot(self) -> FigureSet:
        histograms = {
            name: {labels: one.buckets() for labels, one in family.items()} for name, family in self._histograms.items()
        }
        return FigureSet({name: dict(family) for name, family in self._counters.items()}, histograms)

    def take(self) -> FigureSet:
        """All of it, leaving nothing."""
        taken = self.snapshot()
        self._counters.clear()
        self._histograms.clear()
        return taken

    def add(self, more: FigureSet) -> None:
        """Another process's figures. Those that this version does not know are left out."""
        for name, family in more.counters.items():
            for labels, amount in family.items():
                self.count(name, amount, labels)
        for name, histograms in more.histograms.items():
            for labels, buckets in histograms.items():
                if name in BOUNDS and len(buckets.counts) == len(BOUNDS[name]) + 1:
                    self.histogram(name, labels).add(buckets)


def quantile(name: str, buckets: Buckets, share: float) -> float | None:
    """The value that `share` of the observations stay below, interpolated within its bucket; None without any."""
    bounds = BOUNDS[name]
    rank = share * sum(buckets.counts)
    below = 0
    for place, count in enumerate(buckets.counts):
        if count and below + count >= rank:
            if place == len(bounds):
                return bounds[-1]
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (rank - below) / count
        below += count
    return None

"""When to try again, where, and after how long: plain decisions, no I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from orcaserve.cluster.client_errors import ApiError, ConnectionFailed, OrcaserveError, TimedOut

_STATUSES = frozenset({425, 429, 500, 502, 503, 504})
_ELSEWHERE = frozenset({500, 502, 503, 504})  # another server may be better off


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter; the server's Retry-After is a lower bound."""

    max_retries: int = 3
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0
    max_retry_after_s: float = 60.0  # asked to wait longer than this, the error is raised instead


def worth_retrying(error: OrcaserveError) -> bool:
    """Nothing had come of the request, and the next one may fare better."""
    if isinstance(error, ApiError):
        return error.status in _STATUSES or (error.status == 0 and error.kind == "server_error")
    return isinstance(error, ConnectionFailed) and not isinstance(error, TimedOut)


@dataclass
class Attempts:
    """The course of one call over several servers. `url` is where to go next."""

    urls: Sequence[str]
    policy: RetryPolicy
    rng: random.Random
    first: int = 0  # index of the server to begin with
    num_failures: int = 0
    _tried: set[int] = field(default_factory=set)

    @property
    def index(self) -> int:
        return self.first % len(self.urls)

    @property
    def url(self) -> str:
        return self.urls[self.index]

    def succeeded(self) -> None:
        """Something came: failures are counted anew."""
        self.num_failures = 0
        self._tried.clear()

    def failed(self, error: OrcaserveError) -> float:
        """Seconds to wait before the next try; raises the error when there is to be none.

        While there are servers that have not been tried since the last success, the next one is tried at once.
        """
        if not worth_retrying(error) or self.num_failures >= self.policy.max_retries + len(self.urls) - 1:
            raise error
        self.num_failures += 1
        self._tried.add(self.index)
        elsewhere = not isinstance(error, ApiError) or error.status in _ELSEWHERE or error.status == 0
        if elsewhere and len(self.urls) > 1:
            self.first += 1
            if self.index not in self._tried:
                return 0.0
        self._tried.clear()
        retry_after_s = (error.retry_after_s or 0.0) if isinstance(error, ApiError) else 0.0
        if retry_after_s > self.policy.max_retry_after_s:
            raise error
        longest_s = min(self.policy.max_delay_s, self.policy.first_delay_s * 2 ** min(self.num_failures - 1, 16))
        return retry_after_s + self.rng.uniform(0, longest_s)

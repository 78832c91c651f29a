"""Throughput on the scheduler's clock: tokens computed a second, lately."""

from __future__ import annotations

import math

WINDOW_S = 10.0


class Meter:
    """An exponentially weighted rate: work done `WINDOW_S` ago counts 1/e. Time with no work counts as slow time
    only while steps are coming in, so a pause between two bursts is not taken for a slow machine."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0
        self._last_s = -1.0

    def add(self, num_tokens: int, since_s: float, now_s: float) -> None:
        """A step that was planned at `since_s` came back with this many tokens computed."""
        took = max(0.0, now_s - max(since_s, self._last_s))
        self._last_s = now_s
        fade = math.exp(-took / WINDOW_S)
        self._work = self._work * fade + num_tokens
        self._busy_s = self._busy_s * fade + took

    @property
    def tokens_per_s(self) -> float:
        """0 until something was measured."""
        return self._work / self._busy_s if self._busy_s > 0 else 0.0

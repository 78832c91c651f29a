"""Streaming takes at most half of a router's time, and waits for nothing while there is time enough."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from orcaserve.cluster.stream_bell import Bell


class HandLoop:
    """An event loop whose time is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.timers: list[tuple[float, int, Callable[..., None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.soon.append((call, args))

    def call_at(self, at_s: float, call: Callable[..., None]) -> HandLoop:
        heapq.heappush(self.timers, (at_s, len(self.timers), call))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def turn(self, takes_s: float) -> None:
        """Run what is ready, which takes that long, and the timers that have come due."""
        ready, self.soon = self.soon, []
        self.now_s += takes_s
        for call, args in ready:
            call(*args)
        while self.timers and self.timers[0][0] <= self.now_s:
            heapq.heappop(self.timers)[2]()


class Reader:
    """Counts how often it is woken; reads all that there is each time."""

    def __init__(self) -> None:
        self.num_woken = 0
        self.has_unread = False

    def wake(self) -> None:
        self.num_woken += 1
        self.has_unread = False

    def get_delta(self, bell: Bell) -> None:
        if not self.has_unread:
            self.has_unread = True
            bell.add(self)  # type: ignore[arg-type]


def test_a_router_that_can_follow_wakes_its_readers_at_once() -> None:
    loop, reader = HandLoop(), Reader()
    bell = Bell(loop)  # type: ignore[arg-type]
    for step in range(10):
        reader.get_delta(bell)
        bell.ring()
        assert reader.num_woken == step + 1
        for _ in range(4):
            loop.turn(0.001)
        loop.turn(0.016)  # the rest of a step of 20 ms


def test_one_that_cannot_rests_as_long_as_it_has_worked() -> None:
    loop, reader = HandLoop(), Reader()
    bell = Bell(loop)  # type: ignore[arg-type]
    for _ in range(400):  # a step in each turn, and turns of 10 ms
        reader.get_delta(bell)
        bell.ring()
        loop.turn(0.010)
    # Three turns until all are served, three of rest.
    assert 400 / 7 <= reader.num_woken <= 400 / 6 + 1


def test_nobody_is_left_waiting_in_the_end() -> None:
    loop, one, other = HandLoop(), Reader(), Reader()
    bell = Bell(loop)  # type: ignore[arg-type]
    one.get_delta(bell)
    bell.ring()
    other.get_delta(bell)
    bell.ring()
    assert (one.num_woken, other.num_woken) == (1, 0)
    bell.close()
    assert (one.num_woken, other.num_woken) == (1, 1)
    assert not loop.timers

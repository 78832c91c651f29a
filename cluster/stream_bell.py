"""When the readers of a router's streams are woken: at once, as long as that leaves time for all else."""

from __future__ import annotations

import asyncio

from orcaserve.cluster.stream_held import Held


class Bell:
    """Wakes those who have something to read, and rests for as long as serving them took before it does so again.

    So a router that cannot follow its scheduler step by step spends at most half of its time on what it streams, and
    gives each stream all that came meanwhile as one piece; new requests get the other half. One that can follow never
    has to wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Held] = []
        self._rung_s = 0.0
        self._busy = False  # those who were woken have not all been served
        self._timer: asyncio.TimerHandle | None = None

    def add(self, held: Held) -> None:
        """It has got its first unread delta."""
        self._waiting.append(held)

    def ring(self) -> None:
        """Wake those that were added, now or after the rest."""
        if self._waiting and not self._busy and self._timer is None:
            self._ring()

    def close(self) -> None:
        """Wake whoever waits, once and for all."""
        if self._timer is not None:
            self._timer.cancel()
        for held in self._waiting:
            held.wake()
        self._waiting = []

    def _ring(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._busy = True
        self._rung_s = self._loop.time()
        for held in waiting:
            held.wake()
        self._loop.call_soon(self._served, 2)  # behind the readers, and behind the turn in which their chunks are sent

    def _served(self, turns: int) -> None:
        if turns > 0:
            self._loop.call_soon(self._served, turns - 1)
            return
        self._busy = False
        now_s = self._loop.time()
        self._timer = self._loop.call_at(now_s + (now_s - self._rung_s), self._ring)

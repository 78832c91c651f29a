"""The requests of a group that advance by one token in every step: kept from step to step, not rebuilt."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from orcaserve.engine.request import Request


class DecodeStep(NamedTuple):
    """One step's decodes. `rows` and `slots` are shared by all steps between two changes of the batch."""

    rows: list[Request]
    slots: bytes
    stop_ids: frozenset[int]
    filling: list[Request]  # those whose block this step fills
    ending: list[Request]  # those whose last token, by length, this step samples


NO_DECODES = DecodeStep([], b"", frozenset(), [], [])


class DecodeBatch:
    """All rows move in lockstep, so nothing is counted per row and step.

    `tick` numbers the steps that ran the batch. A row that computes position p at tick t computes p + 1 at t + 1, so
    the ticks at which it needs a new block are all the same modulo the block size: `_buckets[tick % block_size]`
    holds exactly the rows that need a block now, and never changes while the batch is steady. The tick of the last
    token is known when the row joins. A step therefore costs what crosses a boundary, not what runs.

    With speculation rows advance by as many tokens as were accepted; then only membership is used and the planner
    looks at every row.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.tick = 0
        self.rows_by_tenant: Counter[str] = Counter()
        self._block_size = block_size
        self._rows: list[Request] = []
        self._slots = np.zeros(num_slots, np.int32)
        self._buckets: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Request, None]] = {}
        self._num_stops: Counter[int] = Counter()
        self._frozen: tuple[list[Request], bytes, frozenset[int]] | None = ([], b"", frozenset())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Request]:
        return self._rows

    def join(self, request: Request, position: int) -> None:
        """From the next step on; `position` is the one that it will compute first."""
        request.row = len(self._rows)
        self._rows.append(request)
        self._slots[request.row] = request.slot
        blocks_reach = len(request.blocks) * self._block_size
        request.bucket = (self.tick + blocks_reach - position) % self._block_size
        self._buckets[request.bucket][request] = None
        request.end_tick = self.tick + request.max_len - 2 - position
        self._ends.setdefault(request.end_tick, {})[request] = None
        self._num_stops.update(request.stops)
        self.rows_by_tenant[request.tenant] += 1
        self._frozen = None

    def leave(self, request: Request) -> None:
        last = self._rows.pop()
        if last is not request:
            self._rows[request.row] = last
            self._slots[request.row] = last.slot
            last.row = request.row
        request.row = -1
        del self._buckets[request.bucket][request]
        ends = self._ends[request.end_tick]
        del ends[request]
        if not ends:
            del self._ends[request.end_tick]
        for token in request.stops:
            self._num_stops[token] -= 1
            if not self._num_stops[token]:
                del self._num_stops[token]
        self.rows_by_tenant[request.tenant] -= 1
        if not self.rows_by_tenant[request.tenant]:
            del self.rows_by_tenant[request.tenant]
        self._frozen = None

    def needing_block(self) -> dict[Request, None]:
        """Rows whose position at this tick opens a new block."""
        return self._buckets[self.tick % self._block_size]

    @property
    def steady_rows(self) -> list[Request] | None:
        """The rows of the last step if they are still the same ones."""
        return self._frozen[0] if self._frozen is not None and self._rows else None

    def quiet_steps(self, num_free: int) -> int:
        """For how many steps no row ends and `num_free` blocks will do."""
        return min(min(self._ends) - self.tick, num_free // len(self._rows) * self._block_size)

    def filling_at(self, tick: int) -> list[Request]:
        """Rows that fill a block in the step of that tick."""
        return list(self._buckets[(tick + 1) % self._block_size])

    def step(self) -> DecodeStep:
        """Run all rows once; those that end by length leave. Blocks have been handed out before."""
        if not self._rows:
            return NO_DECODES
        if self._frozen is None:
            self._frozen = (self._rows.copy(), self._slots[: len(self._rows)].tobytes(), frozenset(self._num_stops))
        rows, slots, stop_ids = self._frozen
        filling = self.filling_at(self.tick)
        ending = list(self._ends.get(self.tick, ()))
        for request in ending:
            self.leave(request)
        self.tick += 1
        return DecodeStep(rows, slots, stop_ids, filling, ending)

    def step_speculating(self) -> DecodeStep:
        """As `step`, where neither the end nor the fill of a block is known before the result."""
        if not self._rows:
            return NO_DECODES
        if self._frozen is None:
            self._frozen = (self._rows.copy(), self._slots[: len(self._rows)].tobytes(), frozenset(self._num_stops))
        rows, slots, stop_ids = self._frozen
        return DecodeStep(rows, slots, stop_ids, rows, [])

    def check_invariants(self) -> None:
        for i, request in enumerate(self._rows):
            assert request.row == i, f"row {i} holds a request that believes to be in row {request.row}"
            assert self._slots[i] == request.slot, f"row {i}: slot {self._slots[i]}, request's {request.slot}"
            assert request in self._buckets[request.bucket], f"row {i} is in no bucket"
            assert request in self._ends[request.end_tick], f"row {i} has no end"
        assert sum(map(len, self._buckets)) == len(self._rows), "a bucket holds a request that left"
        assert sum(map(len, self._ends.values())) == len(self._rows), "an end is left over"
        assert self._num_stops == Counter(t for r in self._rows for t in r.stops), "stop ids do not add up"
        assert self.rows_by_tenant == Counter(r.tenant for r in self._rows), "tenants do not add up"

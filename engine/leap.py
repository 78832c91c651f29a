"""Many steps of a group at once where nothing can happen in them: the same rows decode, and nobody ends, joins or goes.

For virtual clocks. What `Scheduler.apply` and `Scheduler.schedule` do for such steps one by one is done for all of them
together, so that a step costs what changes: a few sums, and the blocks that fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.draft import StepRecord
from orcaserve.engine.group import Group
from orcaserve.engine.messages import TokenDelta
from orcaserve.engine.meter import Meter
from orcaserve.engine.outbox import Outbox
from orcaserve.engine.planner import Planner
from orcaserve.engine.policy import WaitingQueue
from orcaserve.engine.stats import Counters


class Leaper:
    """Advances one group. It may lag behind while others are planned for: see `spare_blocks`."""

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        planner: Planner,
        outbox: Outbox,
        meter: Meter,
        counters: Counters,
    ) -> None:
        self._queue = queue
        self._block_size = config.block_size
        self._planner = planner
        self._outbox = outbox
        self._meter = meter
        self._counters = counters
        # Drafts, shared blocks and pauses for whole prompts make steps differ, and under some policies the order of
        # what waits depends on what has run: nothing of that is foreseen here.
        self._possible = (
            config.enable_chunked_prefill
            and not config.enable_prefix_caching
            and not config.num_speculative_tokens
            and config.scheduling_policy in ("fcfs", "priority")
        )

    def quiet_steps(self, group: Group) -> int:
        """How many steps are alike from here on, unless the group starts something that waits (`Planner.leaves_all`).

        0 once anything was preempted: then dispatch looks at what every request of a group may still need.
        """
        if not self._possible or self._counters.num_preemptions or group.prefills or group.forks or group.freed_slots:
            return 0
        rows = group.decodes.steady_rows
        if rows is None or len(group.in_flight) < self._planner.max_in_flight:
            return 0
        for record in group.in_flight:
            if record.decodes.rows is not rows or record.chunks or record.ends or record.decodes.stop_ids:
                return 0
        return group.decodes.quiet_steps(group.kv.pool.num_free)

    def spare_blocks(self, group: Group) -> int:
        """As long as the steps that a group lags behind fill fewer of these than `waiting_blocks` leaves over, dispatch
        says of it what it would say if it did not lag."""
        return group.kv.pool.num_free - group.kv.watermark_blocks

    @property
    def waiting_blocks(self) -> int:
        """Enough for all that waits."""
        return self._queue.num_tokens // self._block_size + len(self._queue)

    def advance(self, group: Group, ends_s: Sequence[float], token_id: int) -> list[int]:
        """As if for each time the oldest step in flight ended with this token in every row, and another was planned.

        At most `quiet_steps`. Returns the ids of the steps that are in flight now.
        """
        num_steps, depth = len(ends_s), len(group.in_flight)
        batch, flight = group.decodes, group.in_flight
        decodes, num_tokens = flight[0].decodes, flight[0].num_tokens
        planned = deque(record.planned_s for record in flight)
        for end_s in ends_s:
            planned_s = planned.popleft()
            group.time_step(planned_s, end_s)
            self._meter.add(num_tokens, planned_s, end_s)
            planned.append(end_s)
            for request in batch.needing_block():
                group.kv.append_block(request)
            batch.tick += 1
        first = self._planner.take_step_ids(num_steps)
        ids = [*(record.step_id for record in flight), *range(first, first + num_steps)][-depth:]
        flight.clear()
        for step_id, planned_s, ahead in zip(ids, planned, range(depth, 0, -1), strict=True):
            filling = batch.filling_at(batch.tick - ahead)
            flight.append(StepRecord(step_id, planned_s, [], decodes._replace(filling=filling), num_tokens))
        group.num_steps += num_steps
        self._give(group, num_steps, token_id)
        return ids

    def _give(self, group: Group, num_steps: int, token_id: int) -> None:
        """All tokens of a row in one delta."""
        tokens = (token_id,) * num_steps
        stream, deltas = -1, []
        for request in group.decodes.rows:
            request.token_ids.extend(tokens)
            if request.stream != stream:
                stream = request.stream
                deltas = self._outbox.stream(stream)
            deltas.append(TokenDelta(request.request_id, request.choice_index, tokens))
        self._counters.generation_tokens += num_steps * len(group.decodes)
        self._counters.num_steps += num_steps

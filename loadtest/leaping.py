"""The simulation of a large fleet: as `Simulation`, step for step the same times, without going through every step.

While a group only decodes, its steps are alike (`Scheduler.quiet_steps`): their ends are worked out together and the
scheduler is led over them at once (`Scheduler.advance`). When something waits, each group looks at it at the end of its
step, as always (`Scheduler.leaves_all`), but only the one that takes it is brought up to date and goes on step by step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orcaserve.engine.group import STUCK_AFTER_S
from orcaserve.engine.messages import StepPlan, StepResult
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import Arrivals
from orcaserve.loadtest.outcome import Outcome
from orcaserve.loadtest.simulate import FILLER_ID, Simulation, VirtualWorkers, bin_of, filler_ids
from orcaserve.loadtest.steps import StepWork
from orcaserve.loadtest.workload import LoadRequest

MOST_LAG_S = STUCK_AFTER_S / 2  # dispatch would take a group that lags behind for longer for stuck
LONGEST_STEP_S = STUCK_AFTER_S / 4
SHORTEST = 2  # steps for which a leap pays


@dataclass(slots=True)
class Leap:
    """Step 0 is the one that runs when the leap begins; the last one is finished in the ordinary way."""

    ends_s: list[float]
    seconds: list[float]
    rows: int
    kv_tokens: int  # of step 0; each later one reads `rows` more
    slots: bytes
    spare_blocks: int  # of the group when all steps have ended
    done: int = 0  # steps that the scheduler knows to have ended
    looks_at: int = -1  # step at whose end the group looks at the queue; -1: it is not to
    known_s: float = 0.0  # up to when the scheduler has been led


class LeapingSimulation(Simulation):
    """For one `Scheduler` and groups that all run on the same step-time model."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Mapping[int, VirtualWorkers],
        requests: Sequence[LoadRequest],
        arrivals: Arrivals,
        *,
        steps_ahead: int = 1,
    ) -> None:
        super().__init__(scheduler, workers, requests, arrivals, steps_ahead=steps_ahead)
        self._engine = scheduler
        self._workers = workers
        self._leaps: dict[int, Leap] = {}
        self._stamps = dict.fromkeys(workers, 0)
        self._num_preemptions = 0

    def run(self) -> Outcome:
        assert self._tick is None, "between two ticks groups may lag behind"
        assert self._step_listener is None, "nobody can listen to steps that are not gone through"
        return super().run()

    # Into a leap and out of it

    def _await(self, group: int, end: float) -> None:
        stamp = self._stamp = self._stamps[group] = self._stamp + 1
        leap = self._foresee(group, end)
        if leap is None:
            heapq.heappush(self._ends, (end, group, stamp))
            return
        self._leaps[group] = leap
        heapq.heappush(self._ends, (leap.ends_s[-1], group, stamp))
        if self._engine.num_waiting:
            self._look_at(group, leap, 0)

    def _foresee(self, group: int, end: float) -> Leap | None:
        num_steps = self._engine.quiet_steps(group)
        if num_steps < SHORTEST:
            return None
        began, plan, _, work = self._running[group]
        seconds = self._workers[group].decode_seconds(work, num_steps)
        if max(work.seconds, seconds[-1]) > LONGEST_STEP_S:
            return None
        ends = [end]
        for step_s in seconds:
            end += step_s
            ends.append(end)
        block_size = self._engine.config.block_size
        spare = self._engine.spare_blocks(group) - work.rows * -(-num_steps // block_size)
        if spare < self._engine.waiting_blocks:
            return None
        return Leap(ends, [work.seconds, *seconds], work.rows, work.kv_tokens, plan.decode_slots, spare, known_s=began)

    def _catch_up(self, group: int, leap: Leap, upto: int) -> None:
        """Lead the scheduler over the steps before number `upto`, which is the one that runs now."""
        first = leap.done
        if upto == first:
            return
        ids, by_stream = self._engine.advance(group, leap.ends_s[first:upto], FILLER_ID)
        leap.done, leap.known_s = upto, leap.ends_s[upto - 1]
        self._workers[group].skip(upto - first)
        self._note_all(leap.seconds[first:upto], leap.rows)
        self._receive(by_stream[0], leap.known_s)
        plans = [StepPlan(step_id, [], [], b"", b"", [], [], leap.slots) for step_id in ids]
        result = StepResult(plans[0].step_id, filler_ids(leap.rows))
        self._running[group] = (leap.known_s, plans[0], result, self._work(leap, upto))
        self._planned[group] = deque(plans[1:])

    def _note_all(self, seconds: list[float], rows: int) -> None:
        """As `_note` for each; they get longer, so where the first and the last are alike all are."""
        tokens = rows * len(seconds)
        self._num_steps += len(seconds)
        self._busy_s += sum(seconds)
        self._computed += tokens
        self._rows += tokens
        place = bin_of(seconds[0])
        if place == bin_of(seconds[-1]):
            self._gaps[place] += tokens
        else:
            for step_s in seconds:
                self._gaps[bin_of(step_s)] += rows

    @staticmethod
    def _work(leap: Leap, step: int) -> StepWork:
        return StepWork(leap.seconds[step], 0, leap.rows, 0, leap.rows, leap.kv_tokens + step * leap.rows, 0)

    def _end_leap(self, group: int, step: int) -> None:
        """From this step on it goes the ordinary way."""
        leap = self._leaps.pop(group)
        self._catch_up(group, leap, step)
        self._stamp = self._stamps[group] = self._stamp + 1
        heapq.heappush(self._ends, (leap.ends_s[step], group, self._stamp))

    # Events

    def _event(self, group: int, now: float, stamp: int) -> None:
        if stamp != self._stamps[group]:
            return  # of a leap that ended early
        leap = self._leaps.get(group)
        if leap is not None:
            if now < leap.ends_s[-1] and not self._takes_something(group, leap, now):
                return
            step = leap.looks_at if now < leap.ends_s[-1] else len(leap.ends_s) - 1
            del self._leaps[group]
            self._catch_up(group, leap, step)
        self._finish_step(group, now)
        if self._engine.num_preemptions != self._num_preemptions:
            self._stop_leaping(group, now)

    def _takes_something(self, group: int, leap: Leap, now: float) -> bool:
        step = leap.looks_at
        if not self._engine.num_waiting:
            leap.looks_at = -1
            return False
        if now - leap.known_s > MOST_LAG_S:
            self._catch_up(group, leap, step)
        if not self._engine.leaves_all(group, now):
            return True
        self._look_at(group, leap, step + 1)
        return False

    def _look_at(self, group: int, leap: Leap, step: int) -> None:
        """At the end of this step the group looks at the queue; at the last one it does so in any case."""
        if step < len(leap.ends_s) - 1:
            leap.looks_at = step
            heapq.heappush(self._ends, (leap.ends_s[step], group, self._stamps[group]))
        else:
            leap.looks_at = -1

    def _wake(self, now: float) -> None:
        """Something waits: whoever looks at it now must see the other groups as they are, and these look at it next."""
        wanted = self._engine.waiting_blocks
        for group, leap in list(self._leaps.items()):
            if leap.spare_blocks < wanted:
                self._end_leap(group, bisect_right(leap.ends_s, now))
            elif now - leap.known_s > MOST_LAG_S:
                self._catch_up(group, leap, bisect_right(leap.ends_s, now))
        super()._wake(now)
        if self._engine.num_waiting:
            for group, leap in self._leaps.items():
                if leap.looks_at < 0:
                    self._look_at(group, leap, bisect_right(leap.ends_s, now, leap.done))

    def _stop_leaping(self, group: int, now: float) -> None:
        """Memory has run out at the step end of `group`: from here on dispatch wants to know everything."""
        self._num_preemptions = self._engine.num_preemptions
        for other, leap in list(self._leaps.items()):
            passed = bisect_right if other < group else bisect_left
            self._end_leap(other, passed(leap.ends_s, now))

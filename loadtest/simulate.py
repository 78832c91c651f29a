"""The scheduler that serves, on a virtual clock: arrivals and step ends are events, steps take what an executor says.

The same loop runs a million requests on a step-time model, and a few dozen on the real model (`table.py`), where the
clock advances by what each step and each scheduling call really took.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from orcaserve.engine.errors import RequestRefused
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult, TokenDelta
from orcaserve.engine.sampling import SamplingParams
from orcaserve.loadtest.arrivals import Arrivals, ClosedLoop
from orcaserve.loadtest.outcome import Outcome
from orcaserve.loadtest.step_time import StepTime
from orcaserve.loadtest.steps import StepLog, StepWork
from orcaserve.loadtest.workload import LoadRequest


class StepScheduler(Protocol):
    """What the loop needs of `engine.scheduler.Scheduler` and of `engine.baselines.StaticBatchScheduler`."""

    def add(self, request: GenerateRequest, now_s: float) -> None: ...
    def has_work(self, group_id: int) -> bool: ...
    def schedule(self, group_id: int, now_s: float) -> StepPlan | None: ...
    def apply(self, group_id: int, result: StepResult, now_s: float) -> dict[int, list[TokenDelta]]: ...


class Executor(Protocol):
    """One group's workers: carries out a plan."""

    def step(self, plan: StepPlan) -> tuple[StepResult, StepWork]: ...


Sample = Callable[[int], bytes]  # rows -> int32 ids
FILLER_ID = 1
_FILLER = np.full(65536, FILLER_ID, np.int32).tobytes()


def filler_ids(rows: int) -> bytes:
    """The same token for every row: lengths come from max_tokens, not from the text."""
    return _FILLER[: 4 * rows]


class PlanMeter:
    """Follows the contexts of a group's slots through its plans, to know what each step reads and computes."""

    def __init__(self, num_slots: int) -> None:
        self._context = np.zeros(num_slots, np.int64)
        self._steady_slots = b""  # decode slots of the last step; their contexts lag behind by `_lag`
        self._lag = 0
        self._steady_kv = 0

    def measure(self, plan: StepPlan) -> StepWork:
        """The plan's work, `seconds` still 0. Steady decodes cost a comparison of bytes, whatever their number."""
        prefill = pairs = kv = rows = 0
        if plan.chunks:
            self._settle()
            for chunk in plan.chunks:
                n, start = chunk.num_tokens, chunk.start
                prefill += n
                pairs += n * start + n * (n + 1) // 2
                kv += start + n
                rows += chunk.samples
                self._context[chunk.slot] = start + n
        decodes = len(plan.decode_slots) // 4
        if decodes:
            if plan.decode_slots == self._steady_slots:
                self._lag += 1
                self._steady_kv += decodes
            else:
                self._settle()
                slots = np.frombuffer(plan.decode_slots, np.int32)
                self._context[slots] += 1
                self._steady_slots, self._steady_kv = plan.decode_slots, int(self._context[slots].sum())
            kv += self._steady_kv
        return StepWork(0.0, prefill, decodes, 0, rows + decodes, kv, pairs)

    def skip(self, num_steps: int) -> None:
        """So many more steps with the decodes of the last one were measured by somebody else."""
        self._lag += num_steps
        self._steady_kv += num_steps * (len(self._steady_slots) // 4)

    def _settle(self) -> None:
        if self._lag:
            self._context[np.frombuffer(self._steady_slots, np.int32)] += self._lag
        self._lag, self._steady_slots = 0, b""


class VirtualWorkers:
    """A group whose steps take what the step-time model says."""

    def __init__(self, step_time: StepTime, num_slots: int, sample: Sample = filler_ids) -> None:
        self._step_time = step_time
        self._meter = PlanMeter(num_slots)
        self._sample = sample

    def step(self, plan: StepPlan) -> tuple[StepResult, StepWork]:
        work = self._meter.measure(plan)
        work.seconds = self._step_time.seconds(work.tokens, work.rows, work.kv_tokens, work.prefill_pairs)
        return StepResult(plan.step_id, self._sample(work.rows)), work

    def decode_seconds(self, last: StepWork, num_steps: int) -> list[float]:
        """Of the steps after `last`, with the same decodes."""
        return self._step_time.decode_seconds(last.rows, last.kv_tokens + last.rows, num_steps)

    def skip(self, num_steps: int) -> None:
        """These were not carried out one by one."""
        self._meter.skip(num_steps)


# Logarithmic bins of step durations, 10 us to 1,000 s, 2% apart: enough for any percentile of the gaps.
_BINS = np.geomspace(1e-5, 1e3, 931)
_LOG_LOW, _LOG_STEP = math.log(1e-5), math.log(1e8) / 930


def bin_of(seconds: float) -> int:
    """Its place among the gaps."""
    place = int((math.log(seconds) - _LOG_LOW) / _LOG_STEP) + 1 if seconds > 1e-5 else 0
    return min(place, len(_BINS))


class Simulation:
    """Runs a workload through one scheduler and its groups' executors until every request has ended."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executors: Mapping[int, Executor],
        requests: Sequence[LoadRequest],
        arrivals: Arrivals,
        *,
        prompt_ids: Callable[[LoadRequest], Sequence[int]] | None = None,
        ignore_eos: bool = True,
        steps_ahead: int = 1,
        arrive_together: bool = False,
        keep_steps: bool = False,
        host_clock: Callable[[], float] | None = None,
        num_padding: Callable[[], int] | None = None,
    ) -> None:
        """`steps_ahead`: plans made before the running step's result is known (max_steps_in_flight - 1).

        `arrive_together`: requests due at the same moment are all queued before a step is planned.
        `host_clock`: when given, the time that scheduling really takes passes on the virtual clock too.
        `num_padding`: how many tokens were computed for nobody so far, of a scheduler that pads. Without it only rows
        whose token nobody got count as padding (their request had ended in the step before).
        """
        self._scheduler = scheduler
        self._executors = dict(executors)
        self._requests = requests
        self._prompt_ids = prompt_ids
        self._ignore_eos = ignore_eos
        self._steps_ahead = steps_ahead
        self._arrive_together = arrive_together
        self._host_clock = host_clock
        self._num_padding = num_padding
        self._loop = arrivals if isinstance(arrivals, ClosedLoop) else None
        self._due: list[tuple[float, int]] = []  # closed loop: (time, request) heap
        self._times = [] if isinstance(arrivals, ClosedLoop) else arrivals.times_s.tolist()
        if self._loop is None and len(self._times) < len(requests):
            raise ValueError(f"{len(requests)} requests but only {len(self._times)} arrival times")
        self._next = 0  # open loop: next request; closed loop: next one that a user takes
        self._ends: list[tuple[float, int, int]] = []  # (time, group, stamp) heap of running steps
        self._running: dict[int, tuple[float, StepPlan, StepResult, StepWork]] = {}
        self._planned: dict[int, deque[StepPlan]] = {group: deque() for group in executors}
        self._idle = dict.fromkeys(executors)
        self._stamp = 0
        self._zeros = (1,) * max((r.prompt_tokens for r in requests), default=1)
        n = len(requests)
        self._arrival, self._first, self._end = [math.nan] * n, [math.nan] * n, [math.nan] * n
        self._queue, self._tokens, self._ended = [math.nan] * n, [0] * n, [0] * n
        self._reasons: dict[str, int] = {}
        self._refused = 0
        self._gaps = [0] * (len(_BINS) + 1)
        self._num_steps = self._computed = self._padding = self._rows = 0
        self._busy_s = 0.0
        self._steps = StepLog() if keep_steps else None
        self._step_listener: Callable[[float, StepPlan, StepWork, list[TokenDelta]], None] | None = None
        self._tick: Callable[[float], None] | None = None
        self._tick_s = self._tick_due = math.inf
        self._num_open = n

    def on_step(self, listener: Callable[[float, StepPlan, StepWork, list[TokenDelta]], None]) -> None:
        """Call `listener(time, plan, work, deltas)` when a step's result was applied (the demonstration prints it)."""
        self._step_listener = listener

    def every(self, period_s: float, call: Callable[[float], None]) -> None:
        """Call `call(time)` every `period_s`, until the last request has ended."""
        self._tick, self._tick_s, self._tick_due = call, period_s, period_s

    def add_executor(self, group: int, executor: Executor, now: float) -> None:
        """A group that the scheduler knows now has workers."""
        self._executors[group] = executor
        self._planned[group] = deque()
        self._idle[group] = None
        self._wake(now)

    def remove_executor(self, group: int) -> bool:
        """False while it is at work."""
        if group in self._running or self._planned[group]:
            return False
        del self._executors[group], self._planned[group], self._idle[group]
        return True

    def run(self) -> Outcome:
        """Until all requests have ended; raises RuntimeError if work is left that no event will ever move."""
        wall = time.perf_counter()
        if self._loop is not None:
            for user in range(min(self._loop.num_users, len(self._requests))):
                heapq.heappush(self._due, (0.0, user))
                self._next = user + 1
        now = 0.0
        while True:
            arrival = self._next_arrival()
            if self._num_open and self._tick_due <= min(arrival, self._ends[0][0] if self._ends else math.inf):
                now = self._tick_due
                self._tick_due += self._tick_s
                assert self._tick is not None
                self._tick(now)
            elif self._ends and self._ends[0][0] <= arrival:
                now, group, stamp = heapq.heappop(self._ends)
                self._event(group, now, stamp)
            elif arrival < math.inf:
                now = arrival
                self._arrive(now)
            else:
                break
        if unfinished := sum(not ended for ended in self._ended):
            raise RuntimeError(f"the simulation stalled at {now:.3f} s with {unfinished} requests unfinished")
        return self._outcome(now, time.perf_counter() - wall)

    def _next_arrival(self) -> float:
        if self._loop is not None:
            return self._due[0][0] if self._due else math.inf
        return self._times[self._next] if self._next < len(self._requests) else math.inf

    def _arrive(self, now: float) -> None:
        if self._loop is not None:
            _, index = heapq.heappop(self._due)
        else:
            index = self._next
            self._next += 1
        request = self._requests[index]
        self._arrival[index] = now
        ids = self._prompt_ids(request) if self._prompt_ids is not None else self._zeros[: request.prompt_tokens]
        sampling = SamplingParams(request.output_tokens, index, temperature=0.0, ignore_eos=self._ignore_eos)
        try:
            self._scheduler.add(GenerateRequest(str(index), tuple(ids), sampling, tenant=request.tenant), now)
        except RequestRefused:
            self._refused += 1
            self._close(index, now)
            return
        if not (self._arrive_together and self._next_arrival() == now):
            self._wake(now)

    def _wake(self, now: float) -> None:
        """Offer what waits to the idle groups, until nothing waits."""
        for group in list(self._idle):
            if not self._scheduler.has_work(group):
                break
            self._start_step(group, now)

    def _start_step(self, group: int, now: float) -> bool:
        """Run the next plan of an idle group, if there is one."""
        started = self._host_clock() if self._host_clock is not None else 0.0
        planned = self._planned[group]
        plan = planned.popleft() if planned else self._scheduler.schedule(group, now)
        if plan is None:
            return False
        if self._host_clock is not None:
            now += self._host_clock() - started
        self._idle.pop(group, None)
        result, work = self._executors[group].step(plan)
        self._running[group] = (now, plan, result, work)
        while len(planned) < self._steps_ahead and (ahead := self._scheduler.schedule(group, now)) is not None:
            planned.append(ahead)
        self._await(group, now + work.seconds)
        return True

    def _await(self, group: int, end: float) -> None:
        """The step that the group has just started ends then."""
        heapq.heappush(self._ends, (end, group, self._stamp))

    def _event(self, group: int, now: float, stamp: int) -> None:
        """What the heap had is due."""
        self._finish_step(group, now)

    def _finish_step(self, group: int, now: float) -> None:
        started = self._host_clock() if self._host_clock is not None else 0.0
        began, plan, result, work = self._running.pop(group)
        by_stream = self._scheduler.apply(group, result, now)
        if self._host_clock is not None:
            now += self._host_clock() - started
        deltas = by_stream.get(0, [])
        self._count_padding(work, self._receive(deltas, now))
        self._note(began, work)
        if self._step_listener is not None:
            self._step_listener(now, plan, work, deltas)
        if not self._start_step(group, now):
            self._idle[group] = None

    def _receive(self, deltas: list[TokenDelta], now: float) -> int:
        """Returns how many tokens there were."""
        tokens = self._tokens  # a local: this loop runs once for every token of the simulation
        received = 0
        for delta in deltas:
            index = int(delta.request_id)
            before = tokens[index]
            new = len(delta.token_ids)
            tokens[index] = before + new
            received += new
            if not before and new:
                self._first[index] = now
                self._queue[index] = delta.queue_s
            if delta.finish_reason is not None:
                self._reasons[delta.finish_reason] = self._reasons.get(delta.finish_reason, 0) + 1
                self._close(index, now)
        return received

    def _count_padding(self, work: StepWork, received: int) -> None:
        """Move what was computed for nobody from the step's prefill or decode tokens to its padding."""
        padding = work.rows - received
        if self._num_padding is not None:
            total = self._num_padding()
            padding = total - self._padding
        if padding:
            work.padding_tokens += padding
            if work.decode_tokens:
                work.decode_tokens -= padding
            else:
                work.prefill_tokens -= padding

    def _close(self, index: int, now: float) -> None:
        self._end[index] = now
        self._ended[index] += 1
        self._num_open -= 1
        if self._loop is not None and self._next < len(self._requests):
            heapq.heappush(self._due, (now + self._loop.think_s, self._next))
            self._next += 1

    def _note(self, now: float, work: StepWork) -> None:
        self._num_steps += 1
        self._busy_s += work.seconds
        self._computed += work.tokens
        self._padding += work.padding_tokens
        self._rows += work.rows
        self._gaps[bin_of(work.seconds)] += work.decode_tokens
        if self._steps is not None:
            self._steps.add(now, work)

    def _outcome(self, now: float, wall_s: float) -> Outcome:
        centres = np.concatenate([[1e-5], np.sqrt(_BINS[:-1] * _BINS[1:]), [1e3]])
        return Outcome(
            arrival_s=np.array(self._arrival),
            first_s=np.array(self._first),
            end_s=np.array(self._end),
            queue_s=np.array(self._queue),
            output_tokens=np.array(self._tokens),
            ends=np.array(self._ended),
            finish_reasons=self._reasons,
            refused=self._refused,
            duration_s=now,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            computed_tokens=self._computed,
            padding_tokens=self._padding,
            sampled_tokens=self._rows,
            gap_s=centres,
            gap_counts=np.array(self._gaps),
            steps=self._steps,
            wall_s=wall_s,
        )

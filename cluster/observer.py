"""What the scheduler knows about itself: figures of every step, the last steps one by one, and an event log.

Feeding a step's figures costs under 2 us. Single steps are kept only while somebody asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from orcaserve.cluster.figures import FIRST_TOKEN, INTER_TOKEN, PLAN_TIME, STEP_TIME, STEP_TOKENS, Buckets, Figures
from orcaserve.cluster.wire import (
    ClusterStatus,
    EngineLimits,
    Event,
    NodeSeen,
    RankStep,
    StepSeen,
    StepTimes,
    Timed,
    View,
)
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import StepPlan, StepResult

Entry = TypeVar("Entry", StepSeen, RankStep, Event)

MAX_STEPS = 2048  # kept for those who ask, which they do several times a second
MAX_EVENTS = 200
WATCHED_FOR_S = 3.0  # after the last question
LATELY_S = 60.0
LATELY_EVERY_S = 5.0


@dataclass(slots=True)
class Flight:
    """A step that is under way, and the moments of its way out."""

    plan: StepPlan
    plan_s: float  # the scheduler began to think
    planned_s: float
    sent_s: float = 0.0


class Observer:
    """Belongs to one SchedulerService. The clock is the scheduler's."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.figures = Figures()
        self._clock = clock
        self._limits = EngineLimits(
            config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.enable_prefix_caching
        )
        self._step_time = self.figures.histogram(STEP_TIME)
        self._step_tokens = self.figures.histogram(STEP_TOKENS)
        self._plan_time = self.figures.histogram(PLAN_TIME)
        self._seq = 0
        self._steps: deque[StepSeen] = deque(maxlen=MAX_STEPS)
        self._rank_steps: deque[RankStep] = deque(maxlen=4 * MAX_STEPS)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._watched_until_s = self._traced_until_s = 0.0
        self._lately: deque[tuple[float, dict[str, Buckets]]] = deque([(clock(), self._latencies())])

    # Steps

    def traces(self, now_s: float) -> bool:
        """Whether the ranks are to report too."""
        return now_s < self._traced_until_s

    def landed(
        self, group_id: int, flight: Flight, result: StepResult, last_s: float, moments: tuple[float, float, float]
    ) -> None:
        """A step is over. `last_s`: when the one before it was; `moments`: result received, applied, published."""
        plan = flight.plan
        received_s = moments[0]
        num_tokens = len(plan.decode_slots) // 4 * (1 + plan.num_draft_tokens)
        for chunk in plan.chunks:
            num_tokens += chunk.num_tokens
        step_s = received_s - max(flight.sent_s, last_s)
        self._step_time.observe(step_s)
        self._step_tokens.observe(num_tokens)
        self._plan_time.observe(flight.planned_s - flight.plan_s)
        if received_s < self._watched_until_s:
            prefill = [(chunk.slot, chunk.num_tokens) for chunk in plan.chunks]
            times = StepTimes(
                flight.plan_s, flight.planned_s, flight.sent_s, *moments, result.forward_s, result.sample_s
            )
            seen = StepSeen(self._next(), group_id, plan.step_id, step_s, prefill, plan.decode_slots, times)
            self._steps.append(seen)

    def timed(self, group_id: int, rank: int, timed: Timed) -> None:
        """A rank tells when it worked on a step."""
        self._rank_steps.append(RankStep(self._next(), group_id, rank, timed.step_id, timed.began_s, timed.ended_s))

    # Events

    def note(self, kind: str, text: str) -> None:
        """One more line of the event log."""
        self._events.append(Event(self._next(), self._clock(), kind, text))

    # Questions

    def tick(self, now_s: float) -> None:
        """About once a second: remember how the latencies stood."""
        if now_s - self._lately[-1][0] >= LATELY_EVERY_S:
            self._lately.append((now_s, self._latencies()))
        while len(self._lately) > 1 and self._lately[1][0] <= now_s - LATELY_S:
            self._lately.popleft()

    def view(self, status: ClusterStatus, nodes: list[NodeSeen], after: int | None, traced: bool) -> View:
        """Everything; steps and events only with `after`, and then those that are newer."""
        now_s = self._clock()
        if after is not None:
            self._watched_until_s = now_s + WATCHED_FOR_S
            if traced:
                self._traced_until_s = self._watched_until_s
        since = self._seq if after is None else after
        past, present = self._lately[0][1], self._latencies()
        return View(
            now_s,
            status,
            self._limits,
            self.figures.snapshot(),
            {name: present[name].minus(past[name]) for name in present},
            self._seq,
            nodes,
            _newer(self._steps, since),
            _newer(self._rank_steps, since),
            _newer(self._events, since),
        )

    def _latencies(self) -> dict[str, Buckets]:
        return {name: self.figures.histogram(name).buckets() for name in (FIRST_TOKEN, INTER_TOKEN)}

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def _newer(entries: deque[Entry], since: int) -> list[Entry]:
    found: list[Entry] = []
    for entry in reversed(entries):
        if entry.seq <= since:
            break
        found.append(entry)
    found.reverse()
    return found

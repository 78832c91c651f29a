"""A day on the virtual clock: groups that follow the load, as the autoscaler decides, against a fixed number of them.

A day is pressed into a few hours, so the load rises and falls faster than it would, while starts and delays take their
real time: what scaling saves here is less than it would save over 24 hours.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from orcaserve.cluster.autoscaling import Autoscaler, ScalingRules, load_of
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import OpenLoop, daily
from orcaserve.loadtest.fleet import Fleet
from orcaserve.loadtest.leaping import LeapingSimulation
from orcaserve.loadtest.metrics import Slo
from orcaserve.loadtest.outcome import Figures, figures
from orcaserve.loadtest.simulate import Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import StepTime
from orcaserve.loadtest.workload import LoadRequest

CONTROL_PERIOD_S = 1.0


class DaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The load: requests a second rise from (1 - swing) to (1 + swing) times the mean and fall again, once."""

    mean_rate: float
    hours: float = 1.0
    swing: float = 0.9
    start_s: float = 60.0  # until a new group takes its first request
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return round(self.mean_rate * self.hours * 3600)

    def arrivals(self) -> OpenLoop:
        rng = np.random.default_rng(self.seed)
        return daily(self.num_requests, self.mean_rate, self.swing, self.hours * 3600, rng)


class Day(msgspec.Struct, frozen=True):
    """What one way to have groups came to."""

    name: str
    group_hours: float  # paid for: from the order of a group until it is gone
    most_groups: int
    num_changes: int
    figures: Figures


class ElasticGroups:
    """Does on the virtual clock what the scheduler actor and its fleet do on the real one."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, rules: ScalingRules, start_s: float) -> None:
        self.group_s = 0.0
        self.most_groups = 0
        self.num_changes = 0
        self._fleet = fleet
        self._scheduler = scheduler
        self._autoscaler = Autoscaler(rules)
        self._start_s = start_s
        self._step_time = StepTime(fleet.shape, fleet.device, fleet.tensor_parallel_size)
        self._starting: dict[int, float] = {}  # group -> when it is ready
        self._ready = list(range(rules.min_groups))
        self._draining: list[int] = []
        self._num_ordered = len(self._ready)

    @property
    def num_wanted(self) -> int:
        return len(self._starting) + len(self._ready)

    def workers(self) -> VirtualWorkers:
        return VirtualWorkers(self._step_time, self._fleet.max_num_seqs)

    def control(self, simulation: Simulation, now_s: float) -> None:
        """Count the cost, open what has started, remove what has drained, and follow the autoscaler's word."""
        self.group_s += CONTROL_PERIOD_S * (self.num_wanted + len(self._draining))
        for group in [group for group, at_s in self._starting.items() if at_s <= now_s]:
            del self._starting[group]
            self._ready.append(group)
            self._scheduler.add_group(group, self._fleet.num_kv_blocks)
            simulation.add_executor(group, self.workers(), now_s)
        stats = self._scheduler.stats()
        running = {group.group_id: group.running for group in stats.groups}
        for group in list(self._draining):
            if not running[group] and simulation.remove_executor(group):
                self._scheduler.remove_group(group, now_s)
                self._draining.remove(group)
        load = load_of(stats, now_s, self.num_wanted, self._fleet.max_num_seqs)
        self._resize(self._autoscaler.decide(load), now_s)

    def _resize(self, wanted: int, now_s: float) -> None:
        self.num_changes += wanted != self.num_wanted
        while self.num_wanted < wanted:
            self._starting[self._num_ordered] = now_s + self._start_s
            self._num_ordered += 1
        while self.num_wanted > wanted:
            if self._starting:
                self._starting.popitem()
            else:
                group = self._ready.pop()
                self._scheduler.drain_group(group)
                self._draining.append(group)
        self.most_groups = max(self.most_groups, self.num_wanted)


def elastic_day(fleet: Fleet, spec: DaySpec, requests: list[LoadRequest], rules: ScalingRules, slo: Slo) -> Day:
    """Groups as the autoscaler wants them, from `rules.min_groups` on."""
    scheduler = fleet.scheduler(rules.min_groups)
    groups = ElasticGroups(fleet, scheduler, rules, spec.start_s)
    executors = {group: groups.workers() for group in range(rules.min_groups)}
    simulation = Simulation(scheduler, executors, requests, spec.arrivals())
    simulation.every(CONTROL_PERIOD_S, lambda now_s: groups.control(simulation, now_s))
    outcome = simulation.run()
    mean_groups = groups.group_s / outcome.duration_s
    return Day(
        "autoscaled",
        groups.group_s / 3600,
        groups.most_groups,
        groups.num_changes,
        figures(outcome, max(1, math.ceil(mean_groups)), slo),
    )


def fixed_day(fleet: Fleet, spec: DaySpec, requests: list[LoadRequest], num_groups: int, slo: Slo) -> Day:
    """The same number of groups all day."""
    step_time = StepTime(fleet.shape, fleet.device, fleet.tensor_parallel_size)
    executors = {group: VirtualWorkers(step_time, fleet.max_num_seqs) for group in range(num_groups)}
    outcome = LeapingSimulation(fleet.scheduler(num_groups), executors, requests, spec.arrivals()).run()
    group_hours = num_groups * outcome.duration_s / 3600
    return Day(f"fixed, {num_groups}", group_hours, num_groups, 0, figures(outcome, num_groups, slo))


def compare(fleet: Fleet, spec: DaySpec, requests: list[LoadRequest], rules: ScalingRules, slo: Slo) -> list[Day]:
    """Autoscaled, then fixed: from the most that scaling used down to the first that keeps the SLO less often."""
    days = [elastic_day(fleet, spec, requests, rules, slo)]
    for number in range(days[0].most_groups, 0, -1):
        days.append(fixed_day(fleet, spec, requests, number, slo))
        if days[-1].figures.slo_attainment < days[0].figures.slo_attainment:
            break
    return days


def as_table(days: list[Day]) -> list[list[str]]:
    head = ["groups", "group-hours", "at most", "changes", "SLO kept", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms"]
    rows = [head]
    for day in days:
        found = day.figures
        rows.append(
            [
                day.name,
                f"{day.group_hours:.2f}",
                str(day.most_groups),
                str(day.num_changes),
                f"{found.slo_attainment:.2%}",
                f"{found.ttft_ms['p50']:,.0f}",
                f"{found.ttft_ms['p99']:,.0f}",
                f"{found.tpot_ms['p50']:,.1f}",
            ]
        )
    return rows

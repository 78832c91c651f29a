"""How many groups the load needs: a function of what was seen, with no clock and no cluster of its own.

Every observation gives a wish, the groups that would serve this moment well. Wishes are smoothed as the Kubernetes
HPA does it (stabilisation windows): up only when all wishes of the last `upscale_delay_s` agree, down only to the
highest wish of the last `downscale_delay_s`. One burst therefore makes one step up, and nothing flaps.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from orcaserve.engine.stats import SchedulerStats


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One moment, as far as scaling is concerned."""

    now_s: float
    num_groups: int  # wanted so far: ready and starting ones
    num_ready: int
    running: int
    waiting: int
    waiting_tokens: int
    slots_per_group: int
    used_kv: float = 0.0  # blocks in use, in units of one group's pool
    tokens_per_s: float = 0.0  # one group's rate lately; 0: not known


class ScalingRules(msgspec.Struct, frozen=True, kw_only=True):
    min_groups: int
    max_groups: int
    ttft_target_s: float = 2.0
    upscale_delay_s: float = 2.0
    downscale_delay_s: float = 120.0
    to_zero_delay_s: float = 300.0
    lookahead_s: float = 30.0  # about what a group takes to start
    slot_share: float = 0.85  # of a group's slots and KV blocks that are in use when it counts as full


class Autoscaler:
    """Remembers recent wishes and recent demand; everything else comes with the observation."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self.reason = ""  # of the last wish, for the log
        self._wishes: deque[tuple[float, int]] = deque()
        self._demand: deque[tuple[float, int]] = deque()  # requests in the house, for the trend

    def decide(self, load: Load) -> int:
        """The number of groups to have from now on."""
        rules = self.rules
        self._demand.append((load.now_s, load.running + load.waiting))
        _forget(self._demand, load.now_s - rules.lookahead_s)
        wish = min(rules.max_groups, max(rules.min_groups, groups_needed(load, rules, self._growth())))
        self.reason = f"{load.running} running, {load.waiting} waiting ({load.waiting_tokens} tokens)"
        self._wishes.append((load.now_s, wish))
        _forget(self._wishes, load.now_s - max(rules.downscale_delay_s, rules.to_zero_delay_s))
        if load.num_groups == 0:
            return wish  # nobody is served: no time to make sure
        if min(self._wishes_of(rules.upscale_delay_s), default=0) > load.num_groups:
            return min(self._wishes_of(rules.upscale_delay_s))
        highest = max(self._wishes_of(rules.downscale_delay_s), default=load.num_groups)
        if highest == 0:
            highest = min(1, max(self._wishes_of(rules.to_zero_delay_s), default=1))
        return min(highest, load.num_groups)

    def _wishes_of(self, window_s: float) -> list[int]:
        """All that held at some time within the window; none when the memory does not reach back that far."""
        since_s = self._wishes[-1][0] - window_s
        before = [wish for at_s, wish in self._wishes if at_s <= since_s]
        return [*before[-1:], *(wish for at_s, wish in self._wishes if at_s > since_s)] if before else []

    def _growth(self) -> float:
        """Requests in the house that the trend adds within the time that a group takes to start.

        Only what rose in both halves of the time looked at is a trend; a step is not.
        """
        (first_s, first), (last_s, last) = self._demand[0], self._demand[-1]
        if last_s - first_s <= self.rules.lookahead_s / 3:
            return 0.0
        middle_s = (first_s + last_s) / 2
        _, middle = min(self._demand, key=lambda seen: abs(seen[0] - middle_s))
        slope = 2 * min(middle - first, last - middle) / (last_s - first_s)
        return max(0.0, slope * self.rules.lookahead_s)


def groups_needed(load: Load, rules: ScalingRules, growth: float = 0.0) -> int:
    """What would serve this moment (and `growth` more requests) well; 0 only when there is nothing to do."""
    demand = load.running + load.waiting
    if demand == 0:
        return 0
    for_slots = (demand + growth) / (load.slots_per_group * rules.slot_share)
    for_memory = load.used_kv / rules.slot_share
    for_ttft = 0.0
    if load.waiting and load.tokens_per_s > 0:
        for_ttft = load.waiting_tokens / (load.tokens_per_s * rules.ttft_target_s)
    return max(1, math.ceil(max(for_slots, for_memory, for_ttft)))


def load_of(stats: SchedulerStats, now_s: float, num_groups: int, slots_per_group: int) -> Load:
    """What the scheduler's figures say; cached blocks are free for whoever needs them."""
    ready = [group for group in stats.groups if not group.draining]
    return Load(
        now_s=now_s,
        num_groups=num_groups,
        num_ready=len(ready),
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        slots_per_group=slots_per_group,
        used_kv=sum(group.used_blocks / group.total_blocks for group in ready),
        tokens_per_s=stats.tokens_per_s / len(ready) if ready else 0.0,
    )


def _forget(history: deque[tuple[float, int]], before_s: float) -> None:
    """Drop what is older, but for the last entry before that time: it tells what held then."""
    while len(history) > 1 and history[1][0] <= before_s:
        history.popleft()

"""Whether a waiting request may start in a group now, and whether another group should have it."""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.dispatch import GroupLoad, choose_group
from orcaserve.engine.group import Group
from orcaserve.engine.request import Request

MAX_PREEMPTIONS = 3
MAX_PASSES = 4  # of each group
MAX_LOOKAHEAD = 64  # requests left to other groups before a group stops looking for one of its own


class Verdict(Enum):
    START = auto()
    PASS = auto()  # it will be started elsewhere: look at the next one
    WAIT = auto()  # it cannot start yet, and nobody may overtake it
    NEVER = auto()  # no group could hold it


class Placement(NamedTuple):
    verdict: Verdict
    matched: list[int]  # blocks of this group to start from


class Promise(NamedTuple):
    """What one look through the queue has left to a group."""

    slots: int = 0
    num_tokens: int = 0
    num_blocks: int = 0


NO_PROMISE = Promise()


class Admission:
    """Late binding: a request waits in no group's queue, and is looked at anew whenever a group could take it.

    Memory for the whole prompt must be free beside a watermark (which is waived where nothing runs). A request that
    was preempted MAX_PREEMPTIONS times is started only where the worst case of everything running and its own fit
    together, and is then no victim any more: that bounds preemptions per request at MAX_PREEMPTIONS.

    A group leaves a request to another one only if that one can start it with its next plan and is expected to have
    its first token sooner, and no request is left more than MAX_PASSES times by each group.
    """

    def __init__(self, config: SchedulerConfig, groups: dict[int, Group]) -> None:
        self._config = config
        self.groups = groups
        self._promised: dict[int, Promise] = {}

    def begin(self) -> None:
        """A group starts to look through the queue: nothing is left to anybody yet."""
        self._promised = {}

    def place(self, request: Request, asking: Group, num_drafted: int, now_s: float) -> Placement:
        """`num_drafted`: tokens that the asking group's plan has already."""
        if request.awaits_step >= 0 and self._still_in_flight(request):
            return Placement(Verdict.WAIT if request.awaits_group == asking.group_id else Verdict.PASS, [])
        matched = asking.kv.match(request)
        fits_here = self._fits(request, asking, matched)
        if len(self.groups) == 1:
            if fits_here:
                return Placement(Verdict.START, matched)
            return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.NEVER, [])
        size = self._config.block_size
        here = GroupLoad(asking.group_id, fits_here, len(matched) * size, asking.owed_tokens + num_drafted)
        others = self._rivals(request, asking, here, now_s)
        chosen = choose_group(request.num_tokens, [here, *others], asking.group_id)
        if chosen == asking.group_id or (fits_here and request.num_passes >= MAX_PASSES * len(self.groups)):
            return Placement(Verdict.START, matched)
        if chosen is not None:
            request.num_passes += 1
            self._promise(request, next(load for load in others if load.group_id == chosen))
            return Placement(Verdict.PASS, [])
        if not any(self._could_ever_fit(request, group) for group in self.groups.values()):
            return Placement(Verdict.NEVER, [])
        return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.PASS, [])

    def _rivals(self, request: Request, asking: Group, here: GroupLoad, now_s: float) -> list[GroupLoad]:
        """Groups that would do better than the asking one and those before them; the cheap questions come first."""
        size, num_tokens = self._config.block_size, request.num_tokens
        best = num_tokens - here.num_cached_tokens + here.work_ahead_tokens if here.can_start else math.inf
        rivals = []
        for group in self.groups.values():
            promised = self._promised.get(group.group_id, NO_PROMISE)
            work_ahead = group.owed_tokens + promised.num_tokens
            if work_ahead >= best or group is asking or group.draining or group.num_free_slots <= promised.slots:
                continue
            if num_tokens + work_ahead >= best and not group.kv.holds_start(request):
                continue
            matched = group.kv.match(request)
            cost = num_tokens - len(matched) * size + work_ahead
            if cost >= best or group.is_stuck(now_s) or not self._fits(request, group, matched, promised.num_blocks):
                continue
            best = cost
            rivals.append(GroupLoad(group.group_id, True, len(matched) * size, work_ahead))
        return rivals

    def _promise(self, request: Request, load: GroupLoad) -> None:
        """What was left to a group weighs on it for the rest of this look through the queue."""
        before = self._promised.get(load.group_id, NO_PROMISE)
        self._promised[load.group_id] = Promise(
            before.slots + 1,
            before.num_tokens + request.num_tokens - load.num_cached_tokens,
            before.num_blocks + -(-request.num_tokens // self._config.block_size),
        )

    def _fits(self, request: Request, group: Group, matched: list[int], num_promised: int = 0) -> bool:
        if not group.busy:
            return group.kv.has_room(request, matched, num_promised)
        keep_free = group.kv.watermark_blocks + num_promised
        if request.num_preemptions >= MAX_PREEMPTIONS:
            others = [*group.running, *group.forks]
            growth = sum(max(0, self._most_blocks(other, group) - len(other.blocks)) for other in others)
            own = self._most_blocks(request, group) - group.kv.num_blocks_for(request.num_tokens)
            keep_free = max(keep_free, growth + own)
        return group.kv.has_room(request, matched, keep_free)

    def _most_blocks(self, request: Request, group: Group) -> int:
        return min(
            group.kv.pool.num_blocks, group.kv.num_blocks_for(request.max_len + self._config.num_speculative_tokens)
        )

    def _could_ever_fit(self, request: Request, group: Group) -> bool:
        return group.kv.num_blocks_for(request.num_tokens) <= group.kv.pool.num_blocks

    def _still_in_flight(self, request: Request) -> bool:
        group = self.groups.get(request.awaits_group)
        if group is not None and group.in_flight and group.in_flight[0].step_id <= request.awaits_step:
            return True
        request.awaits_group = request.awaits_step = -1
        return False

"""Whether a waiting request may start in a group now, and whether another group should have it."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.dispatch import GroupLoad, choose_group
from orcaserve.engine.group import Group
from orcaserve.engine.request import Request

MAX_PREEMPTIONS = 3
MAX_PASSES = 8


class Verdict(Enum):
    START = auto()
    PASS = auto()  # it will be started elsewhere: look at the next one
    WAIT = auto()  # it cannot start yet, and nobody may overtake it
    NEVER = auto()  # no group could hold it


class Placement(NamedTuple):
    verdict: Verdict
    matched: list[int]  # blocks of this group to start from


class Admission:
    """Late binding: a request waits in no group's queue, and is looked at anew whenever a group could take it.

    Memory for the whole prompt must be free beside a watermark (which is waived where nothing runs). A request that
    was preempted MAX_PREEMPTIONS times is started only where the worst case of everything running and its own fit
    together, and is then no victim any more: that bounds preemptions per request at MAX_PREEMPTIONS.

    A group leaves a request to another one only if that one can start it with its next plan and is expected to have
    its first token sooner, and no request is left more than MAX_PASSES times.
    """

    def __init__(self, config: SchedulerConfig, groups: dict[int, Group]) -> None:
        self._config = config
        self.groups = groups

    def place(self, request: Request, asking: Group, now_s: float) -> Placement:
        if request.awaits_step >= 0 and self._still_in_flight(request):
            return Placement(Verdict.WAIT if request.awaits_group == asking.group_id else Verdict.PASS, [])
        matched = asking.kv.match(request)
        fits_here = self._fits(request, asking, matched)
        if len(self.groups) == 1:
            if fits_here:
                return Placement(Verdict.START, matched)
            return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.NEVER, [])
        chosen = self._choose(request, asking, fits_here, len(matched), now_s)
        if chosen == asking.group_id or (fits_here and request.num_passes >= MAX_PASSES):
            return Placement(Verdict.START, matched)
        if chosen is not None:
            request.num_passes += 1
            return Placement(Verdict.PASS, [])
        if not any(self._could_ever_fit(request, group) for group in self.groups.values()):
            return Placement(Verdict.NEVER, [])
        return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.PASS, [])

    def _choose(self, request: Request, asking: Group, fits: bool, num_matched: int, now_s: float) -> int | None:
        size = self._config.block_size
        loads = [GroupLoad(asking.group_id, fits, num_matched * size, asking.owed_tokens)]
        for group in self.groups.values():
            if group is asking or group.draining or not group.has_free_slot or group.is_stuck(now_s):
                continue
            matched = group.kv.match(request)
            can_start = self._fits(request, group, matched)
            loads.append(GroupLoad(group.group_id, can_start, len(matched) * size, group.owed_tokens))
        return choose_group(request.num_tokens, loads, asking.group_id)

    def _fits(self, request: Request, group: Group, matched: list[int]) -> bool:
        if not group.busy:
            return group.kv.has_room(request, matched, 0)
        keep_free = group.kv.watermark_blocks
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

"""Whether a waiting request may start in a group now, and whether another group should have it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from enum import Enum, auto
from typing import NamedTuple

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.dispatch import GroupLoad, choose_group
from orcaserve.engine.group import Group
from orcaserve.engine.prefix_homes import NOWHERE, PrefixHomes
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


WINDOW = 64  # groups looked at for the least loaded one

NO_PROMISE = Promise()


class Admission:
    """Late binding: a request waits in no group's queue, and is looked at anew whenever a group could take it.

    Memory for the whole prompt must be free beside a watermark (which is waived where nothing runs). A request that
    was preempted MAX_PREEMPTIONS times is started only where the worst case of everything running and its own fit
    together, and is then no victim any more: that bounds preemptions per request at MAX_PREEMPTIONS.

    A group leaves a request to another one only if that one can start it with its next plan and is expected to have
    its first token sooner, and no request is left more than MAX_PASSES times by each group.
    """

    def __init__(self, config: SchedulerConfig, groups: dict[int, Group], homes: PrefixHomes) -> None:
        self._groups = groups
        self._config = config
        self._homes = homes
        self._window = self._window_before = 0
        # Of one look through the queue:
        self._asking: Group
        self._now_s = 0.0
        self._promised: dict[int, Promise] = {}
        self._by_load: list[tuple[int, int]] | None = None  # (work ahead, group), least first; made when needed

    def begin(self, asking: Group, now_s: float) -> None:
        """The asking group starts to look through the queue: nothing has been left to anybody yet."""
        self._asking = asking
        self._now_s = now_s
        self._promised = {}
        self._by_load = None
        self._window_before = self._window

    def forget(self) -> None:
        """The look that was begun last is going to be taken again."""
        self._window = self._window_before

    def place(self, request: Request, num_drafted: int) -> Placement:
        """`num_drafted`: tokens that the asking group's plan has already."""
        asking = self._asking
        if request.awaits_step >= 0 and self._still_in_flight(request):
            return Placement(Verdict.WAIT if request.awaits_group == asking.group_id else Verdict.PASS, [])
        matched = asking.kv.match(request)
        fits_here = self._fits(request, asking, matched)
        if len(self._groups) == 1:
            if fits_here:
                return Placement(Verdict.START, matched)
            return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.NEVER, [])
        num_found = asking.num_found(request, matched)
        here = GroupLoad(asking.group_id, fits_here, num_found, asking.owed_tokens + num_drafted)
        rivals = self._rivals(request, here)
        chosen = choose_group(request.num_tokens, [here, *rivals], asking.group_id)
        if chosen == asking.group_id or (fits_here and request.num_passes >= MAX_PASSES * len(self._groups)):
            return Placement(Verdict.START, matched)
        if chosen is not None:
            request.num_passes += 1
            self._promise(request, next(load for load in rivals if load.group_id == chosen))
            return Placement(Verdict.PASS, [])
        if not any(self._could_ever_fit(request, group) for group in self._groups.values()):
            return Placement(Verdict.NEVER, [])
        return Placement(Verdict.WAIT if self._could_ever_fit(request, asking) else Verdict.PASS, [])

    def _rivals(self, request: Request, here: GroupLoad) -> list[GroupLoad]:
        """Groups that would do better than the asking one and than the rivals before them.

        Walked by work ahead, least first: once that alone is more than the best cost so far, nobody can do better.
        """
        num_tokens, size = request.num_tokens, self._config.block_size
        best = num_tokens - here.num_found_tokens + here.work_ahead_tokens if here.can_start else math.inf
        key = self._asking.kv.start_key(request)
        homes = self._homes.find(key) if key is not None else NOWHERE
        least_to_compute = num_tokens - (num_tokens - 1) // size * size if homes else num_tokens
        if request.saved_kv is not None:
            least_to_compute = min(least_to_compute, num_tokens - request.saved_kv.num_tokens)
        rivals: list[GroupLoad] = []
        for work_ahead, group_id in self._loads(homes):
            if work_ahead + least_to_compute >= best:
                break
            group = self._groups[group_id]
            matched = group.kv.match(request) if group_id in homes else []
            num_found = group.num_found(request, matched) if matched or request.saved_kv is not None else 0
            cost = num_tokens - num_found + work_ahead
            if cost >= best or not self._takes_more(group):
                continue
            promised = self._promised.get(group_id, NO_PROMISE)
            if self._fits(request, group, matched, promised.num_blocks):
                best = cost
                rivals.append(GroupLoad(group_id, True, num_found, work_ahead))
        return rivals

    def _loads(self, homes: Collection[int]) -> list[tuple[int, int]]:
        """(work ahead, group), least first: of all groups, or in a large fleet of a window and of the homes."""
        if self._by_load is None:
            self._by_load = sorted([(g.owed_tokens, g.group_id) for g in self._sample() if g is not self._asking])
        if len(self._groups) <= WINDOW or not homes:
            return self._by_load
        known = {group_id for _, group_id in self._by_load}
        far = [self._groups[g] for g in homes if g in self._groups and g not in known and g != self._asking.group_id]
        promised = self._promised
        return sorted(
            [
                *self._by_load,
                *((g.owed_tokens + promised.get(g.group_id, NO_PROMISE).num_tokens, g.group_id) for g in far),
            ]
        )

    def _sample(self) -> Iterable[Group]:
        """All groups, or in a large fleet a window that moves on each time, so that a look costs the same."""
        if len(self._groups) <= WINDOW:
            return self._groups.values()
        ids = list(self._groups)
        self._window = (self._window + WINDOW) % len(ids)
        picked = ids[self._window : self._window + WINDOW]
        picked += ids[: WINDOW - len(picked)]
        return [self._groups[group_id] for group_id in picked]

    def _takes_more(self, group: Group) -> bool:
        promised = self._promised.get(group.group_id, NO_PROMISE)
        return not group.draining and group.num_free_slots > promised.slots and not group.is_stuck(self._now_s)

    def _promise(self, request: Request, load: GroupLoad) -> None:
        """What was left to a group weighs on it for the rest of this look through the queue."""
        before = self._promised.get(load.group_id, NO_PROMISE)
        promised = Promise(
            before.slots + 1,
            before.num_tokens + request.num_tokens - load.num_found_tokens,
            before.num_blocks + -(-request.num_tokens // self._config.block_size),
        )
        self._promised[load.group_id] = promised
        if self._by_load is not None:
            owed = self._groups[load.group_id].owed_tokens
            old = (owed + before.num_tokens, load.group_id)
            at = bisect_left(self._by_load, old)
            if at < len(self._by_load) and self._by_load[at] == old:
                del self._by_load[at]
                insort(self._by_load, (owed + promised.num_tokens, load.group_id))

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
        group = self._groups.get(request.awaits_group)
        if group is not None and group.in_flight and group.in_flight[0].step_id <= request.awaits_step:
            return True
        request.awaits_group = request.awaits_step = -1
        return False

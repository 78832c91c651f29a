"""The scheduler: a deterministic state machine over requests and groups. Calls in, messages out, time as an argument.

It forms a new batch at every step (iteration-level scheduling, Yu et al., Orca, OSDI 2022), over a paged KV cache
(Kwon et al., SOSP 2023), for any number of groups that share one waiting queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from orcaserve.engine.admission import Admission
from orcaserve.engine.applier import Applier
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.desk import Desk
from orcaserve.engine.group import Group
from orcaserve.engine.leap import Leaper
from orcaserve.engine.messages import SlotKv, StepPlan, StepResult
from orcaserve.engine.outbox import Deltas
from orcaserve.engine.planner import Planner
from orcaserve.engine.policy import DeadlineQueue, make_queue
from orcaserve.engine.prefix_homes import PrefixHomes
from orcaserve.engine.request import Request, State
from orcaserve.engine.stats import GroupStats, SchedulerStats


class Scheduler(Desk):
    """One for all groups. Each group runs its plans in order; results come back in that order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._groups: dict[int, Group] = {}
        self._homes = PrefixHomes()
        super().__init__(config, make_queue(config), self._groups)
        admission = Admission(config, self._groups, self._homes)
        self._planner = Planner(config, self._queue, admission, self._ledger, self._counters)
        self._leaper = Leaper(config, self._queue, self._planner, self._outbox, self._meter, self._counters)
        self._applier = Applier(self._ledger, self._outbox, self._counters, config.num_speculative_tokens > 0)

    # Groups

    def add_group(self, group_id: int, num_blocks: int, kept: Sequence[SlotKv] = ()) -> None:
        """A group that is ready to run plans, with a pool of `num_blocks`: empty but for what its ranks have kept."""
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is here already")
        self.forget_pool(group_id)
        group = self._groups[group_id] = Group(group_id, num_blocks, self.config, self._homes)
        group.kv.restore(kept)

    def drain_group(self, group_id: int) -> None:
        """It takes nothing new; what it runs goes on. A group that is gone already is no mistake, here and below."""
        if group_id in self._groups:
            self._groups[group_id].draining = True

    def share_pool(self, group_id: int, reader: int) -> None:
        """The workers of `reader` can copy blocks of this group from now on, and after its loss until `forget_pool`."""
        if group_id in self._groups and reader in self._groups:
            self._groups[reader].readable.add(group_id)

    def needs_pool(self, group_id: int) -> bool:
        """Whether a request still counts on what this lost group has left."""
        return any(r.saved_kv is not None and r.saved_kv.group_id == group_id for r in self._ledger)

    def forget_pool(self, group_id: int) -> None:
        """What a lost group has left is gone; who counted on it is computed again."""
        for group in self._groups.values():
            group.readable.discard(group_id)
        for request in self._ledger:
            if request.saved_kv is not None and request.saved_kv.group_id == group_id:
                request.saved_kv = None

    def remove_group(self, group_id: int, now_s: float) -> Deltas:
        """It is lost (or drained): its requests wait again, in their old places, with the ids that they have.

        Streams under way share their places out anew, shortest first: each is computed again from its start, and so
        most of them go on soonest.
        A request that has lost `max_group_losses` groups in a row without a token in between is taken for the cause
        and ends with "error"; draining is nobody's fault. Results still in flight count for nothing.
        """
        group = self._groups.pop(group_id, None)
        if group is None:
            return self._outbox.take()
        lost = [*group.running, *group.forks]
        _shortest_first([request for request in lost if request.reported])
        shared = any(group_id in other.readable for other in self._groups.values())
        for request in lost:
            if request.num_landed:
                request.saved_kv = group.save(request) if shared else None
            group.unseat(request)
            request.state = State.WAITING
            request.prompt_logprobs = []
            if not group.draining:
                self._count_loss(request)
            if request.num_group_losses >= self.config.max_group_losses and not group.draining:
                self._ledger.end(
                    request, "error", f"{request.num_group_losses} groups were lost while they ran this request"
                )
            else:
                self._queue.push(request)
                self._counters.num_migrations += 1
        return self._outbox.take()

    def _count_loss(self, request: Request) -> None:
        progressed = request.num_tokens > request.num_at_last_loss >= 0
        request.num_group_losses = 1 if progressed else request.num_group_losses + 1
        request.num_at_last_loss = request.num_tokens

    # Steps

    def schedule(self, group_id: int, now_s: float) -> StepPlan | None:
        """The group's next step, or None: nothing to do for it now, or as many steps in flight as may be."""
        group = self._groups.get(group_id)
        if group is None:
            return None
        if self._expiries:
            self._expire(now_s)
        if isinstance(self._queue, DeadlineQueue):
            self._queue.step_s = group.step_s
        return self._planner.plan(group, now_s)

    def apply(self, group_id: int, result: StepResult, now_s: float) -> Deltas:
        """What a step brought, by stream. A result of a group that was lost meanwhile is dropped."""
        group = self._groups.get(group_id)
        record = group.land(result.step_id, now_s) if group is not None else None
        if record is not None:
            self._meter.add(record.num_tokens, record.planned_s, now_s)
            self._applier.apply(record, result)
        return self._outbox.take()

    def has_work(self, group_id: int) -> bool:
        """Whether `schedule` may have something for this group, now or after the results in flight."""
        group = self._groups.get(group_id)
        if group is None:
            return False
        return group.busy or (len(self._queue) > 0 and not group.draining)

    # Steps that are alike, many at a time, on a virtual clock

    def quiet_steps(self, group_id: int) -> int:
        """How many steps of this group, from here on, are alike unless it starts something new: see `Leaper`."""
        return self._leaper.quiet_steps(self._groups[group_id])

    def spare_blocks(self, group_id: int) -> int:
        """What such a group may fill, less `waiting_blocks`, while it lags behind and dispatch looks at it."""
        return self._leaper.spare_blocks(self._groups[group_id])

    @property
    def waiting_blocks(self) -> int:
        return self._leaper.waiting_blocks

    def leaves_all(self, group_id: int, now_s: float) -> bool:
        """Whether such a group would start nothing that waits, if its step ended now and it planned."""
        return self._planner.leaves_all(self._groups[group_id], now_s)

    def advance(self, group_id: int, ends_s: Sequence[float], token_id: int) -> tuple[list[int], Deltas]:
        """As an `apply` at each of these times, with this token in every row, and a `schedule` after it.

        At most `quiet_steps` of them. Returns the ids of the steps in flight, and the deltas, a row's tokens in one.
        """
        return self._leaper.advance(self._groups[group_id], ends_s, token_id), self._outbox.take()

    # Figures

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_preemptions(self) -> int:
        return self._counters.num_preemptions

    def stats(self) -> SchedulerStats:
        groups = [
            GroupStats(
                group_id=group.group_id,
                running=len(group.running),
                num_slots=group.num_slots,
                total_blocks=group.kv.pool.num_blocks,
                used_blocks=group.kv.pool.num_blocks - group.kv.pool.num_free,
                cached_blocks=group.kv.pool.num_cached,
                free_blocks=group.kv.pool.num_free,
                owed_tokens=group.owed_tokens,
                steps_in_flight=len(group.in_flight),
                step_s=group.step_s,
                draining=group.draining,
            )
            for group in self._groups.values()
        ]
        return self._stats(groups)

    def check_invariants(self) -> None:
        """Assert all that must hold between two calls; for tests, and for idle moments."""
        waiting = 0
        for request in self._ledger:
            assert request.state is not State.FINISHED, f"{request.request_id} has ended and is still here"
            if request.state is State.WAITING:
                assert not request.blocks, f"{request.request_id} waits and holds memory"
                assert request.slot < 0, f"{request.request_id} waits and holds a slot"
                waiting += request.queued_tokens > 0
            else:
                group = request.group
                assert group is not None, f"{request.request_id} runs nowhere"
                assert group is self._groups.get(group.group_id), f"{request.request_id} runs in a group that is gone"
                assert request in group.running or request in group.forks
        assert waiting == len(self._queue), f"{waiting} requests wait, the queue counts {len(self._queue)}"
        here = {id(request) for request in self._ledger}
        for group in self._groups.values():
            group.check_invariants()
            assert all(id(request) in here for request in [*group.running, *group.forks]), "a request runs unknown"


def _shortest_first(requests: Sequence[Request]) -> None:
    places = sorted(request.sequence for request in requests)
    for request, place in zip(sorted(requests, key=lambda request: request.num_tokens), places, strict=True):
        request.sequence = place

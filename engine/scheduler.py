"""The scheduler: a deterministic state machine over requests and groups. Calls in, messages out, time as an argument.

It forms a new batch at every step (iteration-level scheduling, Yu et al., Orca, OSDI 2022), over a paged KV cache
(Kwon et al., SOSP 2023), for any number of groups that share one waiting queue.
"""

from __future__ import annotations

from heapq import heappop, heappush

from orcaserve.engine.admission import Admission
from orcaserve.engine.applier import Applier
from orcaserve.engine.config import SchedulerConfig, check_config
from orcaserve.engine.doorkeeper import Doorkeeper
from orcaserve.engine.errors import InvalidParameter
from orcaserve.engine.group import Group
from orcaserve.engine.ledger import Ledger
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult
from orcaserve.engine.meter import Meter
from orcaserve.engine.outbox import Deltas, Outbox
from orcaserve.engine.planner import Planner
from orcaserve.engine.policy import DeadlineQueue, make_queue
from orcaserve.engine.request import Request, State
from orcaserve.engine.stats import Counters, GroupStats, SchedulerStats


class Scheduler:
    """One for all groups. Each group runs its plans in order; results come back in that order."""

    def __init__(self, config: SchedulerConfig) -> None:
        check_config(config)
        self.config = config
        self._groups: dict[int, Group] = {}
        self._queue = make_queue(config)
        self._outbox = Outbox()
        self._counters = Counters()
        self._meter = Meter()
        self._ledger = Ledger(self._queue, self._outbox)
        self._doorkeeper = Doorkeeper(config, self._groups, self._queue, self._meter)
        admission = Admission(config, self._groups)
        self._planner = Planner(config, self._queue, admission, self._ledger, self._counters)
        self._applier = Applier(self._ledger, self._outbox, self._counters, config.num_speculative_tokens > 0)
        self._expiries: list[tuple[float, int, Request]] = []
        self._num_arrived = 0

    # Groups

    def add_group(self, group_id: int, num_blocks: int) -> None:
        """A group that is ready to run plans, with an empty KV pool of `num_blocks`."""
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is here already")
        self._groups[group_id] = Group(group_id, num_blocks, self.config)

    def drain_group(self, group_id: int) -> None:
        """It takes nothing new; what it runs goes on."""
        self._groups[group_id].draining = True

    def remove_group(self, group_id: int, now_s: float) -> Deltas:
        """It is lost (or drained): its requests wait again, in their old places, with the ids that they have.

        A request that has lost `max_group_losses` groups in a row without a token in between is taken for the cause
        and ends with "error"; draining is nobody's fault. Results still in flight count for nothing.
        """
        group = self._groups.pop(group_id)
        for request in [*group.running, *group.forks]:
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

    # Requests

    def add(self, request: GenerateRequest, now_s: float) -> None:
        """Let a request in, to wait for its start. Raises a RequestRefused if it cannot be served or there is no room.

        A request that its own stream sends again (it lost sight of the scheduler for a while) replaces the one that is
        here: the router knows which ids its client has seen. An id that was aborted a moment ago is dropped.
        """
        if self._ledger.was_aborted_early(request.request_id):
            return
        for choice in range(request.choice_index, request.choice_index + request.n):
            here = self._ledger.find(request.request_id, choice)
            if here is not None and here.stream != request.stream:
                raise InvalidParameter(
                    f"request {request.request_id!r}, choice {choice} is running already", "request_id"
                )
            self._outbox.drop(request.request_id, choice)
            if here is not None:
                self._abort_choice(here)
        self._doorkeeper.check(request)
        choices = [Request(request, i, self._num_arrived + i, now_s, self.config) for i in range(request.n)]
        for each in choices:
            self._ledger.open(each)
        self._num_arrived += request.n
        first, *siblings = choices
        first.siblings = siblings
        if first.num_tokens >= first.max_len:
            self._ledger.end(first, "length")
            return
        self._queue.push(first)
        self._watch_expiry(first)

    def abort(self, request_id: str, choice_index: int | None = None) -> None:
        """End a request, or one choice of it, without a delta, and free all it holds. Unknown ids are remembered."""
        self._outbox.drop(request_id, choice_index)
        choices = self._ledger.choices(request_id)
        if not choices and choice_index is None:
            self._ledger.abort_early(request_id)
        for request in choices:
            if choice_index is None or request.choice_index == choice_index:
                self._abort_choice(request)

    def abort_stream(self, stream: int) -> None:
        """Nobody reads this stream any more: end all that it asked for."""
        self._outbox.drop_stream(stream)
        for request in [r for r in self._ledger if r.stream == stream]:
            self._abort_choice(request)

    def _abort_choice(self, request: Request) -> None:
        if request.state is State.FINISHED:
            return
        heir: Request | None = None
        if request.siblings:
            heir, *rest = request.siblings
            heir.siblings, request.siblings = rest, []
        else:
            for parent in self._ledger.choices(request.request_id):
                if request in parent.siblings:
                    parent.siblings.remove(request)
        self._ledger.close(request, "abort")
        if heir is not None:
            self._queue.push(heir)
            self._watch_expiry(heir)

    # Steps

    def schedule(self, group_id: int, now_s: float) -> StepPlan | None:
        """The group's next step, or None: nothing to do for it now, or as many steps in flight as may be."""
        group = self._groups.get(group_id)
        if group is None:
            return None
        if self._expiries:
            self._expire(now_s)
        if isinstance(self._queue, DeadlineQueue):
            self._queue.tokens_per_s = self._meter.tokens_per_s
        return self._planner.plan(group, now_s)

    def apply(self, group_id: int, result: StepResult, now_s: float) -> Deltas:
        """What a step brought, by stream. A result of a group that was lost meanwhile is dropped."""
        group = self._groups.get(group_id)
        record = group.land(result.step_id, now_s) if group is not None else None
        if record is not None:
            self._meter.add(record.num_tokens, record.planned_s, now_s)
            self._applier.apply(record, result)
        return self._outbox.take()

    def expire(self, now_s: float) -> Deltas:
        """End what waited past its deadline or the queue timeout; also hands out other deltas not handed out yet."""
        self._expire(now_s)
        return self._outbox.take()

    def has_work(self, group_id: int) -> bool:
        """Whether `schedule` may have something for this group, now or after the results in flight."""
        group = self._groups.get(group_id)
        if group is None:
            return False
        return group.busy or (len(self._queue) > 0 and not group.draining)

    # Deadlines

    def _watch_expiry(self, request: Request) -> None:
        if request.reported:
            return
        due = request.deadline_s
        if self.config.queue_timeout_s > 0:
            timeout = request.arrival_s + self.config.queue_timeout_s
            due = timeout if due is None else min(due, timeout)
        if due is not None:
            heappush(self._expiries, (due, request.sequence, request))

    def _expire(self, now_s: float) -> None:
        """The queue timeout is for the first start, the deadline for the first token; both end only what waits."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, request = heappop(self._expiries)
            if request.state is not State.WAITING or request.reported:
                continue
            late = request.deadline_s is not None and request.deadline_s <= now_s
            if late or request.queue_s < 0:
                self._ledger.end(request, "timeout")

    # Figures

    def stats(self) -> SchedulerStats:
        counters = self._counters
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
        return SchedulerStats(
            running=sum(group.running for group in groups),
            waiting=len(self._queue),
            waiting_tokens=self._queue.num_tokens,
            waiting_by_tenant=dict(self._queue.by_tenant),
            groups=groups,
            num_preemptions=counters.num_preemptions,
            num_migrations=counters.num_migrations,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            padding_tokens=counters.padding_tokens,
            num_steps=counters.num_steps,
            num_drafted=counters.num_drafted,
            num_accepted=counters.num_accepted,
            finished=dict(self._ledger.finished),
            tokens_per_s=self._meter.tokens_per_s,
        )

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

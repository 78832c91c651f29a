"""The front of a scheduler, whatever it does behind: requests come in, are aborted, and run out of time."""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import heappop, heappush

from orcaserve.engine.config import SchedulerConfig, check_config
from orcaserve.engine.doorkeeper import Capacity, Doorkeeper
from orcaserve.engine.errors import InvalidParameter
from orcaserve.engine.ledger import Ledger
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.meter import Meter
from orcaserve.engine.outbox import Deltas, Outbox
from orcaserve.engine.policy import WaitingQueue
from orcaserve.engine.request import Request, State
from orcaserve.engine.stats import Counters, GroupStats, SchedulerStats


class Desk:
    """Takes requests to the waiting queue. `groups` says what there is room for; whoever subclasses fills it."""

    def __init__(self, config: SchedulerConfig, queue: WaitingQueue, groups: Mapping[int, Capacity]) -> None:
        check_config(config)
        self.config = config
        self._queue = queue
        self._outbox = Outbox()
        self._counters = Counters()
        self._meter = Meter()
        self._ledger = Ledger(queue, self._outbox)
        self._doorkeeper = Doorkeeper(config, groups, queue, self._meter)
        self._expiries: list[tuple[float, int, Request]] = []
        self._num_arrived = 0

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

    def num_open(self, streams: Container[int]) -> int:
        """Choices that these streams still wait for."""
        return sum(request.stream in streams for request in self._ledger)

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

    def expire(self, now_s: float) -> Deltas:
        """End what waited past its deadline or the queue timeout; also hands out other deltas not handed out yet."""
        self._expire(now_s)
        return self._outbox.take()

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

    def _stats(self, groups: list[GroupStats]) -> SchedulerStats:
        counters = self._counters
        return SchedulerStats(
            running=sum(group.running for group in groups),
            waiting=len(self._queue),
            waiting_tokens=self._queue.num_tokens,
            waiting_by_tenant=dict(self._queue.by_tenant),
            groups=groups,
            num_preemptions=counters.num_preemptions,
            num_migrations=counters.num_migrations,
            num_imported_blocks=counters.num_imported_blocks,
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

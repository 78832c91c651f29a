"""Who is next: the order of the waiting queue, one class a policy. Each states how long it can make anyone wait.

`rank` is the same order for requests that run: when memory runs out, the last in rank goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from heapq import heapify, heappop, heappush

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.request import Request, State

Rank = tuple[float, int]

PRIORITY_STEP_S = 30.0  # one level of priority is worth this much waiting
IMPLIED_DEADLINE_S = 60.0  # for a request that came without one, under the deadline policy
OUTPUT_WEIGHT = 2.0  # a generated token against a prompt token, in fair shares (the paper's choice)


class WaitingQueue(ABC):
    """Counts and life cycle; the order is the subclass's. A request that finished while waiting is skipped lazily."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.by_tenant: Counter[str] = Counter()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def push(self, request: Request) -> None:
        """A request that arrives, or comes back after a preemption or the loss of its group, to its old place."""
        self._count_in(request)
        self._insert(request)

    def put_back(self, request: Request) -> None:
        """A request that was popped and could not start: as if it had not been popped."""
        self._count_in(request)
        self._insert_again(request)

    def pop(self, now_s: float) -> Request | None:
        """The next one, or None."""
        request = self._next(now_s)
        if request is not None:
            self._count_out(request)
        return request

    def discard(self, request: Request) -> None:
        """It has finished while waiting (its state says so)."""
        self._count_out(request)
        self._compact()

    @abstractmethod
    def rank(self, request: Request) -> Rank:
        """Smaller is served first. The arrival number breaks ties."""

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Tokens computed for a tenant; only fair shares care."""
        return

    def charge_step(self, rows_by_tenant: Counter[str]) -> None:
        """One generated token for each row."""
        return

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    def _insert_again(self, request: Request) -> None:
        self._insert(request)

    @abstractmethod
    def _next(self, now_s: float) -> Request | None: ...

    @abstractmethod
    def _compact(self) -> None:
        """Drop finished requests once they outnumber those that wait."""

    def _count_in(self, request: Request) -> None:
        request.queued_tokens = request.num_tokens
        self.num_tokens += request.queued_tokens
        self.by_tenant[request.tenant] += 1
        self._num += 1

    def _count_out(self, request: Request) -> None:
        self.num_tokens -= request.queued_tokens
        self.by_tenant[request.tenant] -= 1
        if not self.by_tenant[request.tenant]:
            del self.by_tenant[request.tenant]
        request.queued_tokens = 0
        self._num -= 1


Entry = tuple[Rank, Request]


def _pop_live(heap: list[Entry]) -> Request | None:
    while heap:
        _, request = heappop(heap)
        if request.state is not State.FINISHED:
            return request
    return None


def _without_finished(heap: list[Entry], num_live: int) -> None:
    if len(heap) > 2 * num_live + 64:
        heap[:] = [entry for entry in heap if entry[1].state is not State.FINISHED]
        heapify(heap)


class FcfsQueue(WaitingQueue):
    """First come, first served. A request waits for those that arrived before it, and for nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[Entry] = []

    def rank(self, request: Request) -> Rank:
        return 0.0, request.sequence

    def _insert(self, request: Request) -> None:
        heappush(self._heap, (self.rank(request), request))

    def _next(self, now_s: float) -> Request | None:
        return _pop_live(self._heap)

    def _compact(self) -> None:
        _without_finished(self._heap, self._num)


class PriorityQueue(FcfsQueue):
    """Lower `priority` first; within one, by arrival.

    A level of priority is worth PRIORITY_STEP_S seconds of waiting. So a request of priority p is overtaken by one
    of priority q < p only if that arrives less than (p - q) * PRIORITY_STEP_S after it: that is the longest for which
    newcomers can hold it back, and every difference that matters at one moment is kept.
    """

    def rank(self, request: Request) -> Rank:
        return request.arrival_s + request.priority * PRIORITY_STEP_S, request.sequence


class FairQueue(WaitingQueue):
    """The tenant that was served least is next: the virtual token counter of Sheng et al., OSDI 2024 (algorithm 2).

    A tenant's counter grows by the prompt tokens computed for it and by OUTPUT_WEIGHT times the tokens generated,
    divided by its weight. A tenant that comes back after having had nothing to wait for starts level with the others,
    so that idleness is not saved up. Between two tenants that both always have work waiting, weighted service differs
    by at most 2 * max(longest prompt, OUTPUT_WEIGHT * tokens that run at once) / smaller weight: no tenant can starve
    another, and within a tenant it is first come, first served.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._served: dict[str, float] = {}
        self._tenants: dict[str, list[Entry]] = {}  # those that have something waiting
        self._order: list[tuple[float, str]] = []  # heap; a tenant's entry may lag behind its counter
        self._level = 0.0  # the counter of the tenant that was served last

    def rank(self, request: Request) -> Rank:
        return self._served.get(request.tenant, self._level), request.sequence

    def charge(self, tenant: str, num_tokens: float) -> None:
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens / self._weights.get(tenant, 1.0)

    def charge_step(self, rows_by_tenant: Counter[str]) -> None:
        for tenant, rows in rows_by_tenant.items():
            self.charge(tenant, OUTPUT_WEIGHT * rows)

    def _insert(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._tenants:
            least = self._least()
            level = self._level if least is None else least[0]
            self._served[tenant] = max(self._served.get(tenant, level), level)
        self._insert_again(request)

    def _insert_again(self, request: Request) -> None:
        tenant = request.tenant
        heap = self._tenants.get(tenant)
        if heap is None:
            heap = self._tenants[tenant] = []
            heappush(self._order, (self._served[tenant], tenant))
        heappush(heap, ((0.0, request.sequence), request))

    def _next(self, now_s: float) -> Request | None:
        while (least := self._least()) is not None:
            served, tenant = least
            heap = self._tenants[tenant]
            request = _pop_live(heap)
            if not heap:
                del self._tenants[tenant]
                heappop(self._order)
            if request is not None:
                self._level = served
                return request
        return None

    def _least(self) -> tuple[float, str] | None:
        """The tenant at the head of the order, once its entry is up to date."""
        while self._order:
            served, tenant = self._order[0]
            if served == self._served[tenant]:
                return served, tenant
            heappop(self._order)
            heappush(self._order, (self._served[tenant], tenant))
        return None

    def _compact(self) -> None:
        if sum(map(len, self._tenants.values())) > 2 * self._num + 64:
            for heap in self._tenants.values():
                _without_finished(heap, 0)


class DeadlineQueue(WaitingQueue):
    """Earliest deadline for the first token first (EDF); those that can no longer be met go last.

    A request without a deadline is ordered as if it had one IMPLIED_DEADLINE_S after its arrival, so only requests
    that arrive within that time (less their own deadline) can overtake it. A hopeless one is served when nothing else
    waits, or ended when its deadline passes: it never waits longer than that. Hopeless: even if it were started at
    once, its prompt takes more steps of the usual length than fit before the deadline.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        super().__init__()
        self.step_s = 0.0  # the usual length of a step; 0 until measured: then nobody is hopeless
        self._budget = max_num_batched_tokens
        self._hopeful: list[Entry] = []
        self._hopeless: list[Entry] = []

    def rank(self, request: Request) -> Rank:
        if request.deadline_s is None:
            return request.arrival_s + IMPLIED_DEADLINE_S, request.sequence
        return request.deadline_s, request.sequence

    def _insert(self, request: Request) -> None:
        heappush(self._hopeful, (self.rank(request), request))

    def _next(self, now_s: float) -> Request | None:
        while (request := _pop_live(self._hopeful)) is not None:
            if not self._is_hopeless(request, now_s):
                return request
            heappush(self._hopeless, (self.rank(request), request))
        return _pop_live(self._hopeless)

    def _is_hopeless(self, request: Request, now_s: float) -> bool:
        if request.deadline_s is None or request.reported:
            return False
        num_steps = -(-request.num_tokens // self._budget)
        return now_s + num_steps * self.step_s > request.deadline_s

    def _compact(self) -> None:
        _without_finished(self._hopeful, self._num)
        _without_finished(self._hopeless, self._num)


def make_queue(config: SchedulerConfig) -> WaitingQueue:
    """The queue of the configured policy."""
    match config.scheduling_policy:
        case "fcfs":
            return FcfsQueue()
        case "priority":
            return PriorityQueue()
        case "fair":
            return FairQueue(config.tenant_weights)
        case "deadline":
            return DeadlineQueue(config.max_num_batched_tokens)

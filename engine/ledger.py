"""Every request that the scheduler has accepted and not yet ended, by id; each ends exactly once, here."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from orcaserve.engine.messages import FinishReason
from orcaserve.engine.outbox import Outbox
from orcaserve.engine.policy import WaitingQueue
from orcaserve.engine.request import Request, State

MAX_REMEMBERED_ABORTS = 4096


class Ledger:
    """Choices by request id, and how they ended."""

    def __init__(self, queue: WaitingQueue, outbox: Outbox) -> None:
        self.finished: Counter[str] = Counter()
        self._queue = queue
        self._outbox = outbox
        self._choices: dict[str, dict[int, Request]] = {}
        self._aborted_early: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[Request]:
        for choices in self._choices.values():
            yield from choices.values()

    def choices(self, request_id: str) -> list[Request]:
        return list(self._choices.get(request_id, {}).values())

    def find(self, request_id: str, choice_index: int) -> Request | None:
        return self._choices.get(request_id, {}).get(choice_index)

    def open(self, request: Request) -> None:
        choices = self._choices.setdefault(request.request_id, {})
        assert request.choice_index not in choices, f"{request.request_id!r}, {request.choice_index} is here already"
        choices[request.choice_index] = request

    def abort_early(self, request_id: str) -> None:
        """An abort for an id that is not here: it may have overtaken its request."""
        self._aborted_early[request_id] = None
        self._aborted_early.move_to_end(request_id)
        if len(self._aborted_early) > MAX_REMEMBERED_ABORTS:
            self._aborted_early.popitem(last=False)

    def was_aborted_early(self, request_id: str) -> bool:
        return request_id in self._aborted_early

    def end(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End without new tokens, choices that have not forked off included."""
        for each in (request, *request.siblings):
            if reason != "abort":
                self._outbox.end(each, reason, error)
            self.close(each, reason)
        request.siblings = []

    def close(self, request: Request, reason: FinishReason) -> None:
        """Free all that it holds; its last delta is out, or nobody wants one."""
        group = request.group
        waited = request.state is State.WAITING
        if group is not None:
            group.unseat(request)
        request.state = State.FINISHED
        choices = self._choices[request.request_id]
        del choices[request.choice_index]
        if not choices:
            del self._choices[request.request_id]
        if waited and request.queued_tokens:
            self._queue.discard(request)
        self.finished[reason] += 1

"""What a router counts of its requests. Sent on to the scheduler, which adds up all routers' (see figures)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orcaserve.cluster import figures
from orcaserve.cluster.exposition import expose
from orcaserve.cluster.figures import Figures, FigureSet
from orcaserve.cluster.wire import View

REPORT_EVERY_S = 1.0

_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/version"})
_OPERATIONS = frozenset({"/health", "/ready", "/metrics", "/cluster", "/console", "/console/feed", "/trace"})


class RequestMetrics:
    """One per router, made on its event loop. `report` takes what was added and says whether it got through."""

    def __init__(self, model_name: str, report: Callable[[FigureSet], bool]) -> None:
        self._model_name = model_name
        self._report = report
        self._figures = Figures()
        self._loop = asyncio.get_running_loop()
        self._report_due: asyncio.TimerHandle | None = None

    def request_ended(self, path: str, status: int, duration_s: float) -> None:
        """An HTTP request, whatever became of it."""
        route = path if path in _ROUTES or path in _OPERATIONS else "other"
        self._figures.count(figures.HTTP_REQUESTS, labels=(route, str(status or 499)))
        if route in ("/v1/chat/completions", "/v1/completions") and status == 200:
            self._figures.histogram(figures.LATENCY).observe(duration_s)
        self._report_soon()

    def refused(self, code: str) -> None:
        """A generation request that got an error."""
        self._figures.count(figures.REFUSED, labels=(code,))
        self._report_soon()

    def first_token(self, seconds: float, queue_s: float, tenant: str = "") -> None:
        """The first piece of a request is there."""
        self._figures.histogram(figures.FIRST_TOKEN).observe(seconds)
        self._figures.histogram(figures.QUEUE_TIME).observe(queue_s)
        self._figures.histogram(figures.TENANT_QUEUE_TIME, (tenant,)).observe(queue_s)
        self._report_soon()

    def next_token(self, seconds: float, num_tokens: int = 1) -> None:
        """One more piece of a stream."""
        self._figures.histogram(figures.INTER_TOKEN).observe(seconds)
        self._figures.count(figures.GENERATION_TOKENS, num_tokens)
        self._report_soon()

    def generated(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Tokens that a request has brought in, and that were handed out for it, since this was last said of it."""
        self._figures.count(figures.PROMPT_TOKENS, num_prompt_tokens)
        self._figures.count(figures.GENERATION_TOKENS, num_tokens)
        self._report_soon()

    def choice_ended(self, finish_reason: str) -> None:
        """stop or length; timeout, error or abort (the client left) where it came to no good end."""
        self._figures.count(figures.SUCCESS, labels=(finish_reason,))
        self._report_soon()

    def flush(self) -> None:
        """Report now; what does not get through is kept for the next time."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        added = self._figures.take()
        if not self._report(added):
            self._figures.add(added)
            self._report_soon()

    def close(self) -> None:
        """Report a last time."""
        self.flush()
        if self._report_due is not None:
            self._report_due.cancel()

    def render(self, view: View | None) -> bytes:
        """The exposition text; without a view of the scheduler only that there is none."""
        return expose(self._model_name, view)

    def _report_soon(self) -> None:
        if self._report_due is None:
            self._report_due = self._loop.call_later(REPORT_EVERY_S, self.flush)

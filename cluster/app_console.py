"""The operators' routes: the console's page and its feed, and traces of the next few seconds."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from orcaserve.cluster.app_run import Engine
from orcaserve.cluster.console_state import ConsoleState
from orcaserve.cluster.errors import RateLimited
from orcaserve.cluster.step_trace import StepTrace
from orcaserve.engine.errors import InvalidParameter, Unavailable

FEED_EVERY_S = 0.25
MAX_ONLOOKERS = 16  # of one router
MAX_TRACE_S = 60.0

_PAGE = Path(__file__).parent / "console" / "index.html"


class Console:
    """The routes of one router, and how many look on."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._page = _PAGE.read_bytes()
        self._num_onlookers = 0
        self._num_traces = 0

    def routes(self) -> APIRouter:
        router = APIRouter()
        policy = _content_policy(self._page.decode())

        @router.get("/console", include_in_schema=False)
        async def console() -> Response:
            """The page: one file that needs nothing from elsewhere."""
            headers = {"content-security-policy": policy, "cache-control": "no-cache", "x-frame-options": "DENY"}
            return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

        @router.get("/console/feed", include_in_schema=False)
        async def feed() -> Response:
            """Server-sent events with the state of the service, until the page is closed."""
            if self._num_onlookers >= MAX_ONLOOKERS:
                raise RateLimited(f"{MAX_ONLOOKERS} consoles are open on this router already.", retry_after_s=10.0)
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(self._feed(), media_type="text/event-stream", headers=headers)

        @router.get("/trace", include_in_schema=False)
        async def trace(request: Request) -> Response:
            """The next seconds of all groups, step by step, in the format of Chrome's and Perfetto's trace viewers."""
            return Response(await self._trace(_seconds(request)), media_type="application/json")

        return router

    async def _feed(self) -> AsyncIterator[bytes]:
        self._num_onlookers += 1
        try:
            state, after = ConsoleState(self._model_name), 0
            while True:
                view = await self._engine.view(after)
                after = view.seq
                yield b"data: " + msgspec.json.encode(state.of(view, time.time())) + b"\n\n"
                await asyncio.sleep(FEED_EVERY_S)
        except Unavailable:
            return  # the page says so, and comes back by itself
        finally:
            self._num_onlookers -= 1

    async def _trace(self, seconds: float) -> bytes:
        if self._num_traces:
            raise RateLimited("Another trace is being taken on this router.", retry_after_s=seconds)
        self._num_traces += 1
        try:
            trace = StepTrace()
            view = await self._engine.view(after=(await self._engine.view()).seq, traced=True)
            end_s = view.now_s + seconds
            while view.now_s < end_s:
                await asyncio.sleep(min(FEED_EVERY_S, end_s - view.now_s + 0.01))
                view = await self._engine.view(after=view.seq, traced=True)
                trace.add(view)
            return msgspec.json.encode(trace.chrome())
        finally:
            self._num_traces -= 1


def _seconds(request: Request) -> float:
    text = request.query_params.get("seconds", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        raise InvalidParameter(f"seconds must be a number between 0 and {MAX_TRACE_S:g}.", "seconds")
    return seconds


def _content_policy(page: str) -> str:
    """Nothing from elsewhere, no script but the page's own."""
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

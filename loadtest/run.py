"""The load generator: sends a workload to any OpenAI-compatible URL and records what happens to each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from orcaserve.loadtest import server_metrics
from orcaserve.loadtest.arrivals import Arrivals, ClosedLoop
from orcaserve.loadtest.http_stream import HttpFault, StreamClient
from orcaserve.loadtest.metrics import RequestRecord, Slo, Stats, Summary, summarize
from orcaserve.loadtest.prompts import PromptMaker
from orcaserve.loadtest.workload import BadWorkload, LoadRequest

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send and how."""

    base_url: str
    model: str = ""  # empty: the first one that the server lists
    api: Api = "completions"  # completions sends token ids (exact lengths), chat sends words
    api_key: str = ""
    label: str = ""
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True  # so that outputs have the wanted length; an extension that vLLM and orcaserve know
    timeout_s: float = 600.0
    max_concurrency: int = 0  # of an open loop; 0: no limit
    slo: Slo = Slo()


class RunResult(msgspec.Struct):
    """One run, as it is written to JSON."""

    label: str
    model: str
    arrivals: str
    started_at: str
    summary: Summary
    records: list[RequestRecord]
    server_queue_ms: Stats = {}  # from the server's own histogram, where it has one
    server_counters: dict[str, float] = {}


class Progress:
    """Counts for a live display; plain numbers, read by whoever draws."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = self.done = self.failed = self.chunks = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.done - self.failed


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


class Generator:
    """Sends the requests of one run. `clock` counts seconds; the run starts when `run` is called."""

    def __init__(self, config: RunConfig, progress: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self._config = config
        self._progress = progress
        self._clock = clock
        self._client = StreamClient(config.base_url, config.api_key, clock)
        self._prompts = PromptMaker(config.seed)
        self._model = config.model
        self._start_s = 0.0
        self._records: list[RequestRecord] = []

    async def run(self, requests: Sequence[LoadRequest], arrivals: Arrivals) -> RunResult:
        """Send all of them; returns when the last one has ended."""
        sessions = _by_session(requests)
        if self._config.api != "chat" and len(sessions) < len(requests):
            raise BadWorkload("conversations of several turns need api=chat: ids of the answers are not known")
        self._model = self._model or await self._first_model()
        before = await server_metrics.scrape(self._client)
        started_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._start_s = self._clock()
        try:
            if isinstance(arrivals, ClosedLoop):
                await self._closed_loop(sessions, arrivals)
            else:
                await self._open_loop(sessions, arrivals.times_s.tolist())
            after = await server_metrics.scrape(self._client)
        finally:
            self._client.close()
        records = sorted(self._records, key=lambda r: r.index)
        result = RunResult(
            label=self._config.label or self._config.base_url,
            model=self._model,
            arrivals=_describe(arrivals),
            started_at=started_at,
            summary=summarize(records, self._config.slo),
            records=records,
        )
        if before is not None and after is not None:
            result.server_queue_ms = server_metrics.queue_stats_ms(before, after)
            result.server_counters = server_metrics.counters(before, after)
        return result

    async def _first_model(self) -> str:
        status, body = await self._client.get("/v1/models")
        try:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
            raise HttpFault(f"GET /v1/models: status {status}, no model listed ({body[:120]!r})") from error

    def _now(self) -> float:
        return self._clock() - self._start_s

    async def _closed_loop(self, sessions: list[list[LoadRequest]], loop: ClosedLoop) -> None:
        queue = iter(sessions)

        async def user() -> None:
            for session in queue:  # one iterator for all users: each takes the next session
                await self._run_session(session, self._now())
                if loop.think_s:
                    await asyncio.sleep(loop.think_s)

        async with asyncio.TaskGroup() as users:
            for _ in range(min(loop.num_users, len(sessions))):
                users.create_task(user())

    async def _open_loop(self, sessions: list[list[LoadRequest]], times_s: list[float]) -> None:
        if len(times_s) < len(sessions):
            raise BadWorkload(f"{len(sessions)} sessions but only {len(times_s)} arrival times")
        limit = asyncio.Semaphore(self._config.max_concurrency) if self._config.max_concurrency else None

        async def limited(session: list[LoadRequest], due_s: float) -> None:
            if limit is None:
                await self._run_session(session, due_s)
            else:
                async with limit:
                    await self._run_session(session, due_s)

        async with asyncio.TaskGroup() as tasks:
            for session, due_s in zip(sessions, times_s, strict=False):
                if (wait_s := due_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(limited(session, due_s))

    async def _run_session(self, session: list[LoadRequest], due_s: float) -> None:
        """The turns of a conversation one after the other, each with all that was said before."""
        messages: list[dict[str, str]] = []
        for position, request in enumerate(session):
            record, answer = await self._send(request, due_s, messages)
            self._records.append(record)
            if record.status == "failed":
                for skipped in session[position + 1 :]:
                    self._skip(skipped)
                return
            messages += [{"role": "assistant", "content": answer}]
            due_s = self._now()

    def _skip(self, request: LoadRequest) -> None:
        now = self._now()
        self._records.append(
            RequestRecord(request.index, now, now, end_s=now, error="an earlier turn failed", tenant=request.tenant)
        )
        self._progress.sent += 1
        self._progress.failed += 1

    async def _send(
        self, request: LoadRequest, due_s: float, messages: list[dict[str, str]]
    ) -> tuple[RequestRecord, str]:
        body = _encode(self._body(request, messages))
        record = RequestRecord(request.index, due_s, self._now(), tenant=request.tenant)
        reader = _StreamReader(record, request.cancel_after_tokens, self._start_s, self._progress)
        self._progress.sent += 1
        try:
            async with asyncio.timeout(self._config.timeout_s):
                record.http_status, answer = await self._client.post(PATHS[self._config.api], body, reader.on_event)
        except TimeoutError:
            record.error = f"no end within {self._config.timeout_s:g} s"
        except (HttpFault, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            reader.close(answer)
        record.end_s = self._now() if record.status != "ok" else reader.last_s
        if record.status == "failed":
            self._progress.failed += 1
        else:
            self._progress.done += 1
        return record, "".join(reader.text)

    def _body(self, request: LoadRequest, messages: list[dict[str, str]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": self._config.temperature,
            "seed": self._config.seed + request.index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if request.tenant:
            body["user"] = request.tenant
        if self._config.api == "chat":
            messages.append({"role": "user", "content": self._prompts.text(request)})
            body["messages"] = messages
        else:
            body["prompt"] = request.text or self._prompts.ids(request)
        return body


class _StreamReader:
    """Fills one record from its stream's events; `close` gives the verdict."""

    def __init__(self, record: RequestRecord, cancel_after: int | None, start_s: float, progress: Progress) -> None:
        self._record = record
        self._cancel_after = cancel_after
        self._start_s = start_s
        self._progress = progress
        self._done = False
        self.text: list[str] = []
        self.last_s = 0.0

    def on_event(self, payload: bytes, at: float) -> bool:
        record, self.last_s = self._record, at - self._start_s
        if payload == b"[DONE]":
            self._done = True
            return True
        try:
            chunk = _decode_chunk(payload)
        except msgspec.DecodeError as error:
            record.error = f"bad event: {error}"
            return False
        if chunk.error is not None:
            record.error = f"error event: {_error_text(chunk.error)}"
            return False
        if chunk.usage is not None:
            record.prompt_tokens, record.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                record.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
        for choice in chunk.choices:
            self._on_choice(choice)
        if self._cancel_after is not None and len(record.chunk_times_s) >= self._cancel_after and not self._done:
            record.status = "cancelled"
            return False
        return True

    def _on_choice(self, choice: _Choice) -> None:
        record = self._record
        content = choice.text or (choice.delta.content if choice.delta is not None else None)
        if content:
            if record.first_s is None:
                record.first_s = self.last_s
            record.chunk_times_s.append(self.last_s)
            self.text.append(content)
            self._progress.chunks += 1
        if choice.finish_reason:
            record.finish_reason = choice.finish_reason

    def close(self, body: bytes) -> None:
        record = self._record
        if record.status == "cancelled":
            record.output_tokens = record.output_tokens or len(record.chunk_times_s)  # usage never came: at least these
        elif record.error:
            record.status = "failed"
        elif record.http_status != 200:
            record.error = f"HTTP {record.http_status}: {_error_text(body)}"
        elif not self._done:
            record.error = "the stream ended without [DONE]"
        elif not record.output_tokens:
            record.error = "the stream carried no usage"
        else:
            record.status = "ok"


def _error_text(body: Any) -> str:
    """An OpenAI error's message, from its JSON or from a decoded object."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body[:120].decode("utf-8", "replace")
    inner = body.get("error", body) if isinstance(body, dict) else body
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:200]


def _by_session(requests: Sequence[LoadRequest]) -> list[list[LoadRequest]]:
    """Conversations in the order of their first turn; a request on its own is a conversation of one turn."""
    sessions: dict[tuple[str, int], list[LoadRequest]] = {}
    for request in requests:
        key = ("session", request.session) if request.session >= 0 else ("alone", request.index)
        sessions.setdefault(key, []).append(request)
    return list(sessions.values())


def _describe(arrivals: Arrivals) -> str:
    if isinstance(arrivals, ClosedLoop):
        return f"closed loop, {arrivals.num_users} users"
    times = arrivals.times_s
    return f"open loop, {len(times) / times[-1]:.3g} requests/s" if len(times) and times[-1] > 0 else "all at once"

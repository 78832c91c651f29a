"""The answer to a generation request, from body to last byte: prepared, run and written within one ASGI call.

The work stops when the client's connection closes, and takes the engine's part of it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from starlette.responses import Response

from orcaserve.cluster.app_answer import AnswerWriter, StreamWriter, error_event
from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.app_edge import CALL, Call, ClientGone, Receive, Scope, Send, send_json
from orcaserve.cluster.app_job import Job
from orcaserve.cluster.app_metrics import RequestMetrics
from orcaserve.cluster.app_prepare import Preparer
from orcaserve.cluster.app_run import Engine, Run
from orcaserve.cluster.app_trace import Tracer
from orcaserve.cluster.errors import DeadlineExceeded, GenerationFailed, QueueTimeout, parse_body
from orcaserve.cluster.limits import TenantGate
from orcaserve.cluster.protocol import GenerationRequest, ignored_fields
from orcaserve.cluster.protocol_chat import ChatCompletionRequest
from orcaserve.cluster.protocol_completions import CompletionRequest
from orcaserve.engine.errors import RequestRefused
from orcaserve.engine.messages import FinishReason

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generator:
    """What every generation needs; one per router."""

    def __init__(
        self, config: AppConfig, preparer: Preparer, engine: Engine, metrics: RequestMetrics, tracer: Tracer
    ) -> None:
        self.config = config
        self.preparer = preparer
        self.engine = engine
        self.metrics = metrics
        self.tracer = tracer
        self.gate = TenantGate(time.monotonic)
        self.started_at = int(time.time())


GENERATIONS: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


class Generation(Response):
    """A Starlette response that does all the work when it is called."""

    def __init__(self, generator: Generator, kind: type[ChatCompletionRequest] | type[CompletionRequest]) -> None:
        super().__init__()
        self._generator = generator
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        generator = self._generator
        with generator.tracer.span(call), generator.gate.enter(call.tenant):
            work = asyncio.create_task(_Work(generator, call, self._kind, send).run())
            gone = asyncio.create_task(_client_left(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientGone
                work.result()
            finally:
                gone.cancel()
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestRefused):
                    await work


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Work:
    """One request's course."""

    def __init__(
        self,
        generator: Generator,
        call: Call,
        kind: type[ChatCompletionRequest] | type[CompletionRequest],
        send: Send,
    ) -> None:
        self._generator = generator
        self._call = call
        self._kind = kind
        self._send = send
        self._arrived_s = time.perf_counter()
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_ended = 0
        self._num_counted = 0  # tokens that the metrics know of
        self._failure: FinishReason | None = "abort"  # of choices that come to no end: unless said otherwise, they left

    async def run(self) -> None:
        """Raises RequestRefused while nothing was sent yet; after that errors go into the stream."""
        call = self._call
        try:
            request = parse_body(self._kind, call.body, call.header(b"content-type").decode("latin-1"))
            call.body = b""  # megabytes, perhaps, and the stream may live for long
            self._note_request(request)
            job = await self._prepare(request)
        except RequestRefused as refused:
            self._generator.metrics.refused(refused.code or "invalid_request")
            raise
        run = Run(job, self._generator.engine)
        try:
            await (self._stream(run) if job.stream else self._whole(run))
        except RequestRefused as refused:
            self._generator.metrics.refused(refused.code or "invalid_request")
            self._failure = _failure_of(refused)
            raise
        finally:
            self._settle(run)

    async def _prepare(self, request: GenerationRequest) -> Job:
        preparer = self._generator.preparer
        if isinstance(request, ChatCompletionRequest):
            return await preparer.chat(request, self._call.tenant)
        assert isinstance(request, CompletionRequest)
        return await preparer.completion(request, self._call.tenant)

    async def _stream(self, run: Run) -> None:
        codec = self._generator.preparer.codec
        metrics = self._generator.metrics
        writer = StreamWriter(run, codec)
        send = self._call.send
        clock = time.perf_counter
        async with contextlib.aclosing(run.pieces()) as pieces:
            # Nothing is sent before the engine has said yes and begun, so that a refusal gets its own status.
            data = writer.piece(first := await anext(pieces))
            self._note_first(run)
            if first.finish_reason is not None:
                self._note_ended(first.finish_reason)
            last_s = clock()
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM + self._headers})
            try:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for piece in pieces:
                    now_s = clock()
                    metrics.next_token(now_s - last_s, self._new_tokens(run))
                    last_s = now_s
                    if piece.finish_reason is not None:
                        self._note_ended(piece.finish_reason)
                    if data := writer.piece(piece):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                data = writer.closing()
            except RequestRefused as refused:
                self._call.notes["error"] = refused.code or type(refused).__name__
                metrics.refused(refused.code or "invalid_request")
                self._failure = _failure_of(refused) or "error"
                data = error_event(refused)
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _whole(self, run: Run) -> None:
        writer = AnswerWriter(run, self._generator.preparer.codec)
        begun = False
        async with contextlib.aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    self._note_first(run)
                if piece.finish_reason is not None:
                    self._note_ended(piece.finish_reason)
                writer.piece(piece)
        headers = {name.decode(): value.decode() for name, value in self._headers}
        await send_json(200, writer.body(), self._send, headers)

    def _note_request(self, request: GenerationRequest) -> None:
        notes = self._call.notes
        notes["stream"] = bool(request.stream)
        if ignored := ignored_fields(request):
            self._headers.append((b"x-orcaserve-ignored-fields", ", ".join(ignored).encode()))
            notes["ignored_fields"] = ignored
        if self._generator.config.log_prompts:
            notes["prompt"] = _prompt_of(request)

    def _note_first(self, run: Run) -> None:
        seconds = time.perf_counter() - self._arrived_s
        self._call.notes["ttft_ms"] = round(seconds * 1000, 2)
        self._call.notes["queue_ms"] = round(run.queue_s * 1000, 2)
        self._generator.metrics.first_token(seconds, run.queue_s, self._call.tenant.name)

    def _new_tokens(self, run: Run) -> int:
        """Counted as they go out, so that a long answer shows while it is written."""
        num_new = run.num_generated_tokens - self._num_counted
        self._num_counted = run.num_generated_tokens
        return num_new

    def _note_ended(self, finish_reason: str) -> None:
        self._num_ended += 1
        self._call.notes["finish_reason"] = finish_reason
        self._generator.metrics.choice_ended(finish_reason)

    def _settle(self, run: Run) -> None:
        """However it ended: count what was used."""
        generator, notes = self._generator, self._call.notes
        num_choices = run.job.num_per_prompt * len(run.job.prompts)
        if not run.job.resumed and self._failure is not None:
            for _ in range(num_choices - self._num_ended):
                generator.metrics.choice_ended(self._failure)
        generator.metrics.generated(run.num_prompt_tokens, self._new_tokens(run))
        generator.gate.spend(self._call.tenant, run.num_prompt_tokens + run.num_generated_tokens)
        notes["prompt_tokens"] = run.num_prompt_tokens
        notes["cached_tokens"] = run.num_cached_tokens
        notes["completion_tokens"] = run.num_completion_tokens


def _failure_of(refused: RequestRefused) -> FinishReason | None:
    """How a request ended that the engine gave up; None for one that it never took."""
    if isinstance(refused, DeadlineExceeded | QueueTimeout):
        return "timeout"
    return "error" if isinstance(refused, GenerationFailed) else None


def _prompt_of(request: GenerationRequest) -> Any:
    if isinstance(request, ChatCompletionRequest):
        return [{"role": message.role, "content": message.text} for message in request.messages]
    assert isinstance(request, CompletionRequest)
    return request.prompt

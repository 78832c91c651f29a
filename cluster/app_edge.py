"""The edge of the HTTP surface: what happens to every request before a route sees it, and after.

Request id, key, body (bounded in bytes and in time, whole before anything parses it), errors as JSON, one log line.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.app_log import log_request
from orcaserve.cluster.app_metrics import RequestMetrics
from orcaserve.cluster.auth import OPEN_PATHS, KeyRing, Tenant
from orcaserve.cluster.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InternalError,
    UnsupportedMediaType,
    error_body,
    error_headers,
)
from orcaserve.engine.errors import RequestRefused

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CALL = "orcaserve.call"  # where in the ASGI scope the call is found
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The connection closed; nobody waits for an answer."""


@dataclass(slots=True)
class Call:
    """One HTTP request, as the routes see it."""

    request_id: str
    method: str
    path: str
    headers: Headers
    send: Send  # the server's own: for what goes out often, past all layers in between
    tenant: Tenant = field(default_factory=lambda: Tenant())
    body: bytes = b""
    status: int = 0  # of the response, once it has begun
    notes: dict[str, Any] = field(default_factory=dict)  # for the log line

    def header(self, name: bytes) -> bytes:
        """The first header of this (lower-case) name, or nothing."""
        return next((value for key, value in self.headers if key == name), b"")


class Edge:
    """ASGI middleware; the outermost one."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        config: AppConfig,
        keys: KeyRing,
        metrics: RequestMetrics,
        behind_serve: bool,
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._metrics = metrics
        self._behind_serve = behind_serve  # Ray Serve adds an x-request-id of its own, the one that we were given

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no websocket route exists
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        headers: Headers = scope["headers"]
        call = Call(_request_id(headers), scope["method"], scope["path"], headers, send)
        scope[CALL] = call

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                if not self._behind_serve:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.request_id.encode())]
            await send(message)

        try:
            if call.path not in OPEN_PATHS:
                credentials = [value for name, value in headers if name == b"authorization"]
                call.tenant = self._keys.tenant_of(credentials, call.header(b"sec-fetch-site"))
            call.body = await self._read_body(call, receive)
            await self._app(scope, receive, answer)
        except RequestRefused as refused:
            await send_error(call, refused, answer)
        except ClientGone:
            call.notes["client"] = "gone"
        except Exception:  # the edge: whatever it was, the client gets an answer and the log the trace
            logger.exception("request %s failed", call.request_id)
            if not call.status:
                await send_error(call, InternalError(), answer)
        finally:
            duration_s = time.perf_counter() - started_s
            self._metrics.request_ended(call.path, call.status, duration_s)
            log_request(call, duration_s, as_json=self._config.log_format == "json")

    async def _read_body(self, call: Call, receive: Receive) -> bytes:
        if call.method in ("GET", "HEAD", "OPTIONS"):
            return b""
        if call.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise UnsupportedMediaType("A compressed body is not accepted.")
        limit = self._config.max_body_bytes
        declared = call.header(b"content-length")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise BodyTooLarge(limit)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await _receive_all(receive, limit)
        except TimeoutError:
            raise BodyTooSlow(self._config.body_timeout_s) from None


async def _receive_all(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_error(call: Call, refused: RequestRefused, send: Send) -> None:
    """An error as the whole answer."""
    call.notes["error"] = refused.code or type(refused).__name__
    headers = error_headers(refused)
    if refused.status == 401 and call.path.startswith("/console"):
        headers["www-authenticate"] = 'Basic realm="orcaserve: any name, and an API key as the password"'
    if refused.status in (408, 413):  # part of the body may still be on its way
        headers["connection"] = "close"
    await send_json(refused.status, msgspec.json.encode(error_body(refused)), send, headers)


async def send_json(status: int, body: bytes, send: Send, headers: dict[str, str] | None = None) -> None:
    """One JSON answer."""
    fields = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _request_id(headers: Headers) -> str:
    given = next((value for key, value in headers if key == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

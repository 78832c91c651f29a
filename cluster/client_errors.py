"""What can go wrong for a client, on one page.

OrcaserveError
  ConnectionFailed      no answer: refused, reset, or cut off before the first byte
    TimedOut            no answer in time
    IncompleteStream    a stream ended without its end mark
  ApiError              the server said no: `status`, `code`, `param`, `message`, `request_id`
    BadRequest          400, 413, 415, 422: the request can never work
    Unauthorized        401, 403
    NotFound            404
    RateLimited         429: `retry_after_s`
    ServerFailed        5xx: `retry_after_s`
    StreamFailed        an error in the middle of a stream
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


class OrcaserveError(Exception):
    """Base of everything the client raises by itself."""


class ConnectionFailed(OrcaserveError):
    """No answer: refused, reset, or cut off before the first byte."""


class TimedOut(ConnectionFailed):
    """No answer in time."""


class IncompleteStream(ConnectionFailed):
    """The stream ended without its end mark; what came before it has been handed out."""


class ApiError(OrcaserveError):
    """The server refused or gave up."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        kind: str = "",
        code: str | None = None,
        param: str | None = None,
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status  # 0 for an error inside a stream
        self.kind = kind  # OpenAI's error type
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class BadRequest(ApiError):
    """The request can never work as it is."""


class Unauthorized(ApiError):
    """No key, or one that the server does not know."""


class NotFound(ApiError):
    """No such model or route."""


class RateLimited(ApiError):
    """Too much at once, or too many tokens; worth another try after `retry_after_s`."""


class ServerFailed(ApiError):
    """The server cannot answer now."""


class StreamFailed(ApiError):
    """The server gave a stream up after it had begun."""


def error_of(response: httpx.Response) -> ApiError:
    """The typed error of a response that was read and is not a success."""
    detail = _detail(response.content)
    status = response.status_code
    if status in (401, 403):
        kind: type[ApiError] = Unauthorized
    elif status == 404:
        kind = NotFound
    elif status == 429:
        kind = RateLimited
    else:
        kind = ServerFailed if status >= 500 else BadRequest
    return kind(
        detail.get("message") or f"HTTP {status}",
        status=status,
        kind=detail.get("type") or "",
        code=detail.get("code"),
        param=detail.get("param"),
        request_id=response.headers.get("x-request-id", ""),
        retry_after_s=_seconds(response.headers.get("retry-after")),
    )


def stream_error(data: str, request_id: str) -> StreamFailed | None:
    """The error that an event's data holds, if it does."""
    if not data.startswith('{"error"'):
        return None
    detail = _detail(data.encode())
    return StreamFailed(
        detail.get("message") or "the server gave up",
        kind=detail.get("type") or "",
        code=detail.get("code"),
        param=detail.get("param"),
        request_id=request_id,
    )


@contextmanager
def transport_errors() -> Iterator[None]:
    """Our names for what httpx raises."""
    try:
        yield
    except httpx.TransportError as error:
        kind = TimedOut if isinstance(error, httpx.TimeoutException) else ConnectionFailed
        raise kind(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error


def _detail(body: bytes) -> dict[str, str]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:  # an HTTP date, which our server does not send
        return None

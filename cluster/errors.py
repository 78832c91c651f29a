"""Every way a request can fail, as OpenAI's error JSON; and the parsing of a body, where most of them begin.

Messages never hold what the client sent: they name the field, say what is wrong, and give numbers.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from orcaserve.engine.errors import RequestRefused

Model = TypeVar("Model", bound=BaseModel)

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class BadBody(RequestRefused):
    """The body is not a JSON object, or a field of it is wrong."""


class Unauthorized(RequestRefused):
    """No key, or one that we do not know."""

    code = "invalid_api_key"
    status = 401


class NotFound(RequestRefused):
    """No such route."""

    code = "not_found"
    status = 404


class ModelNotFound(RequestRefused):
    """The model that the request names is not served here."""

    code = "model_not_found"
    status = 404

    def __init__(self) -> None:
        super().__init__(
            "The model that the request names is not served here; GET /v1/models lists those that are.", "model"
        )


class MethodNotAllowed(RequestRefused):
    """The route exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class BodyTooLarge(RequestRefused):
    """Read no further than `max_body_bytes`."""

    code = "request_too_large"
    status = 413

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(f"The request body is larger than the limit of {max_body_bytes} bytes.")


class BodyTooSlow(RequestRefused):
    """The body trickles in."""

    code = "request_timeout"
    status = 408

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request body was not there within {timeout_s:g} s.")


class UnsupportedMediaType(RequestRefused):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415

    def __init__(self, message: str = "The body must be sent with 'Content-Type: application/json'.") -> None:
        super().__init__(message)


class RateLimited(RequestRefused):
    """The tenant is over one of its limits."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestRefused):
    """Its own deadline passed before the first token."""

    code = "deadline_exceeded"
    status = 408


class QueueTimeout(RequestRefused):
    """It waited in the queue for as long as the operator lets a request wait."""

    code = "queue_timeout"
    status = 503
    retry_after_s = 1.0


class GenerationFailed(RequestRefused):
    """The engine gave this request up."""

    code = "generation_failed"
    status = 503


class InternalError(RequestRefused):
    """A fault of ours. No request should be able to cause one."""

    code = "internal_error"
    status = 500

    def __init__(self) -> None:
        super().__init__("The server made a mistake; its log has the details under this request's id.")


def error_body(refused: RequestRefused) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def error_headers(refused: RequestRefused) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one, where there is a time; and what a 401 must carry."""
    headers = {"www-authenticate": "Bearer"} if refused.status == 401 else {}
    retry_after_s = getattr(refused, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return headers


def parse_body(model: type[Model], body: bytes, content_type: str) -> Model:
    """The request object in a body, or the one error that says best what is wrong with it."""
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadBody(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadBody("The body must be a JSON object.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> BadBody:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # The names of union branches in our models are written <so>; they are no part of the path.
    path = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith("<"))]
    where = _dotted(path)
    if not path:
        return BadBody(first["msg"])
    # OpenAI names the element of `messages`, and elsewhere the field alone (keys below may be the client's own words).
    param = where if path[0] == "messages" else str(path[0])
    return BadBody(f"{param}: {first['msg']}.", param)


def _dotted(path: list[int | str]) -> str:
    """('messages', 1, 'content') as `messages[1].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text

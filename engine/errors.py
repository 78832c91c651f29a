"""Every way in which a request is refused, on one page. The router turns them into OpenAI error bodies."""

from __future__ import annotations


class RequestRefused(Exception):
    """Base. `param` names the request field at fault (or None), `code` is OpenAI's machine-readable reason."""

    code: str | None = None
    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidParameter(RequestRefused):
    """A field is out of range, of the wrong type, or asks for something unsupported."""


class ContextLengthExceeded(RequestRefused):
    """Prompt plus requested tokens do not fit in max_model_len, or could never fit in the KV pool."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the prompt, {max_tokens} for the "
            f"completion). Please reduce the length of the prompt or of the completion.",
            param,
        )


class QueueFull(RequestRefused):
    """The bounded queue has no room; try again in `retry_after_s`."""

    code = "queue_full"
    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RequestRefused):
    """No group can serve now: starting, draining or lost; try again in `retry_after_s`."""

    code = "unavailable"
    status = 503

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

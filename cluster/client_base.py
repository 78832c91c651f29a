"""What the sync and the async client share: addresses, headers, bodies, and reading whole answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from orcaserve.cluster.client_errors import IncompleteStream, error_of
from orcaserve.cluster.client_retry import Attempts, RetryPolicy

Model = TypeVar("Model", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]

DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
DEFAULT_URL = "http://127.0.0.1:8000"


class ClientBase:
    """`base_url` may be a list: the first one that works is used, and kept to until it fails."""

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not urls:
            raise ValueError("base_url: at least one address is needed")
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._rng = rng or random.Random()
        self._preferred = 0
        self._headers = {"user-agent": "orcaserve"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})

    def _attempts(self) -> Attempts:
        return Attempts(self._urls, self._retry, self._rng, self._preferred)

    def _answer(self, model: type[Model], response: httpx.Response, attempts: Attempts) -> Model:
        """A whole answer as its type. Raises ApiError."""
        if not response.is_success:
            raise error_of(response)
        self._preferred = attempts.index
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise IncompleteStream(f"the answer is not what the API says: {error.errors()[0]['msg']}") from None


def chat_body(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [dict(message) for message in messages], **options}


def completion_body(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a completion request."""
    if isinstance(prompt, str):
        return {"prompt": prompt, **options}
    return {"prompt": [part if isinstance(part, str | int) else list(part) for part in prompt], **options}

"""What the sync and the async client share: addresses, headers, and the server that they keep to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import httpx

from orcaserve.cluster.client_retry import Attempts, RetryPolicy

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

    def _succeeded(self, attempts: Attempts) -> None:
        attempts.succeeded()
        self._preferred = attempts.index

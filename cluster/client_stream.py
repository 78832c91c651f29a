"""What a client knows of a stream under way, and how a broken one is asked to go on. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import httpx

from orcaserve.cluster.client_errors import OrcaserveError, stream_error
from orcaserve.cluster.client_retry import Attempts
from orcaserve.cluster.client_sse import Event, SseParser
from orcaserve.cluster.protocol_responses import ChatCompletionChunk, Completion, Usage

Chunk = TypeVar("Chunk", ChatCompletionChunk, Completion)


class StreamState(Generic[Chunk]):
    """Turns events into chunks. With `resume`, remembers each choice's ids, so that another request can continue it.

    A continued stream reads as if nothing had happened: one id, one opening chunk a choice, one usage over all.
    """

    def __init__(
        self, chunk_type: type[Chunk], path: str, body: Mapping[str, Any], resume: bool, rng: random.Random
    ) -> None:
        self._chunk_type: type[Chunk] = chunk_type
        self.path = path
        self._body = dict(body) | {"stream": True}
        self.done = False
        self._resume = resume
        self._begun = False
        self._request_id = ""
        self._parser = SseParser()
        self._identity: tuple[str, int] | None = None
        self._ids: dict[int, list[int]] = {}
        self._opened: set[int] = set()
        self._finished: set[int] = set()
        self._num_left_out = 0  # tokens of choices that were complete before the last request
        self._wants_ids = bool(self._body.get("return_token_ids"))
        if resume:
            self._body["return_token_ids"] = True
            if self._body.get("seed") is None:  # the noise of the rest must be that of the beginning
                self._body["seed"] = rng.getrandbits(63)
            self._ids = {index: [] for index in range(_num_choices(self._body))}

    def next_body(self) -> dict[str, Any]:
        """What to send: the request, or after a break the request for the rest."""
        if not self._begun:
            return self._body
        left = {i: ids for i, ids in self._ids.items() if i not in self._finished} or self._ids
        self._num_left_out = sum(len(ids) for i, ids in self._ids.items() if i not in left)
        body = {key: value for key, value in self._body.items() if key not in ("deadline_ms", "echo")}
        return body | {"resume_token_ids": {str(i): ids for i, ids in left.items()}}

    def opened(self, response: httpx.Response) -> bool:
        """A response has begun; whether it is a stream, and no error to be read whole."""
        self._parser = SseParser()
        self._request_id = response.headers.get("x-request-id", "")
        return response.is_success

    def feed(self, data: bytes) -> Iterator[Chunk | None]:
        """What these bytes complete; None for a chunk that holds nothing new. Raises StreamFailed."""
        for event in self._parser.feed(data):
            if event.data == "[DONE]":
                self.done = True
                return
            yield self._take(event)

    def wait_s(self, error: OrcaserveError, attempts: Attempts) -> float:
        """Seconds to wait before going on; raises the error when that must not or cannot be."""
        if self._begun and not self._resume:
            raise error
        return attempts.failed(error)

    def _take(self, event: Event) -> Chunk | None:
        if (error := stream_error(event.data, self._request_id)) is not None:
            raise error
        chunk = self._chunk_type.model_validate_json(event.data)
        self._begun = True
        return self._continued(chunk) if self._resume else chunk

    def _continued(self, chunk: Chunk) -> Chunk | None:
        if self._identity is None:
            self._identity = (chunk.id, chunk.created)
        chunk.id, chunk.created = self._identity
        if chunk.usage is not None and self._num_left_out:
            chunk.usage = _with_more(chunk.usage, self._num_left_out)
        choices = [choice for choice in chunk.choices if self._is_news(choice)]
        if chunk.choices and not choices:
            return None
        chunk.choices = choices
        return chunk

    def _is_news(self, choice: Any) -> bool:
        """Note what it brings; false for an opening or an ending that was there before the break."""
        index = choice.index
        if index in self._finished:
            return False
        self._ids.setdefault(index, []).extend(choice.token_ids or ())
        if not self._wants_ids:
            choice.token_ids = None
        if choice.finish_reason is not None:
            self._finished.add(index)
        delta = getattr(choice, "delta", None)
        opens = delta is not None and delta.role is not None and not delta.content
        known = index in self._opened
        self._opened.add(index)
        return not (opens and known)


def _num_choices(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (body.get("n") or 1) * (len(prompt) if several and isinstance(prompt, list) else 1)


def _with_more(usage: Usage, num_tokens: int) -> Usage:
    return usage.model_copy(
        update={
            "completion_tokens": usage.completion_tokens + num_tokens,
            "total_tokens": usage.total_tokens + num_tokens,
        }
    )

"""The Python client for asyncio: `from orcaserve import AsyncClient`. Method by method it is client.Client.

async with AsyncClient("http://127.0.0.1:8000") as client:
    async for chunk in client.stream_chat([{"role": "user", "content": "Hello!"}], resume=True):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import httpx

from orcaserve.cluster.client_base import (
    DEFAULT_TIMEOUT,
    DEFAULT_URL,
    ClientBase,
    Messages,
    Model,
    Prompt,
    chat_body,
    completion_body,
)
from orcaserve.cluster.client_errors import IncompleteStream, OrcaserveError, error_of, transport_error
from orcaserve.cluster.client_options import ChatOptions, CompletionOptions
from orcaserve.cluster.client_retry import RetryPolicy
from orcaserve.cluster.client_sse import SseParser
from orcaserve.cluster.client_stream import Chunk, StreamState
from orcaserve.cluster.protocol_responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterStatusResponse,
    Completion,
    DetokenizeResponse,
    HealthResponse,
    ModelList,
    TokenizeResponse,
)


class AsyncClient(ClientBase):
    """Use it with `async with`, or call `close`. Methods raise OrcaserveError (see client_errors)."""

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = None,
        http: httpx.AsyncClient | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(base_url, api_key=api_key, timeout=timeout, retry=retry, rng=rng)
        self._http = http or httpx.AsyncClient(timeout=timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Continue a conversation."""
        return await self._post(ChatCompletion, "/v1/chat/completions", chat_body(messages, options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue one or several prompts."""
        return await self._post(Completion, "/v1/completions", completion_body(prompt, options))

    def stream_chat(
        self, messages: Messages, *, resume: bool = False, **options: Unpack[ChatOptions]
    ) -> AsyncChunkStream[ChatCompletionChunk]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        state = StreamState(ChatCompletionChunk, chat_body(messages, options), resume, self._rng)
        return AsyncChunkStream(self, "/v1/chat/completions", state)

    def stream_complete(
        self, prompt: Prompt, *, resume: bool = False, **options: Unpack[CompletionOptions]
    ) -> AsyncChunkStream[Completion]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        return AsyncChunkStream(
            self, "/v1/completions", StreamState(Completion, completion_body(prompt, options), resume, self._rng)
        )

    async def models(self) -> ModelList:
        """What is served."""
        return await self._get(ModelList, "/v1/models")

    async def tokenize(self, text: str | Messages, **options: Any) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        field = {"prompt": text} if isinstance(text, str) else {"messages": [dict(message) for message in text]}
        return await self._post(TokenizeResponse, "/tokenize", field | options)

    async def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of token ids."""
        answer = await self._post(DetokenizeResponse, "/detokenize", {"tokens": list(tokens)} | options)
        return answer.prompt

    async def health(self) -> HealthResponse:
        """Is it alive? Raises ServerFailed when not."""
        return await self._get(HealthResponse, "/health")

    async def ready(self) -> HealthResponse:
        """Can it answer? Raises ServerFailed when not."""
        return await self._get(HealthResponse, "/ready")

    async def cluster_status(self) -> ClusterStatusResponse:
        """Groups, queue and cache at this moment."""
        return await self._get(ClusterStatusResponse, "/cluster")

    async def _get(self, model: type[Model], path: str) -> Model:
        return await self._request(model, "GET", path, None)

    async def _post(self, model: type[Model], path: str, body: dict[str, Any]) -> Model:
        return await self._request(model, "POST", path, body)

    async def _request(self, model: type[Model], method: str, path: str, body: dict[str, Any] | None) -> Model:
        attempts = self._attempts()
        while True:
            try:
                try:
                    response = await self._http.request(method, attempts.url + path, json=body, headers=self._headers)
                except httpx.TransportError as error:
                    raise transport_error(error) from error
                return self._answer(model, response, attempts)
            except OrcaserveError as error:
                await asyncio.sleep(attempts.failed(error))


class AsyncChunkStream(Generic[Chunk]):
    """Iterate it once. Leaving the loop early closes the connection, and the server stops working on it."""

    def __init__(self, client: AsyncClient, path: str, state: StreamState[Chunk]) -> None:
        self._client = client
        self._path = path
        self._state: StreamState[Chunk] = state
        self._chunks: AsyncGenerator[Chunk, None] = self._run()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for chunk in self._chunks:
                yield chunk
        finally:
            await self.close()

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; nothing happens when it is over already."""
        await self._chunks.aclose()

    @property
    def text(self) -> AsyncIterator[str]:
        """Only the text of the chunks."""
        return (chunk.text async for chunk in self if chunk.text)

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        state = self._state
        attempts = self._client._attempts()
        while not state.done:
            try:
                async with aclosing(self._once(attempts.url)) as chunks:
                    async for chunk in chunks:
                        if state.progressed:
                            attempts.succeeded()
                            self._client._preferred = attempts.index
                        if chunk is not None:
                            yield chunk
            except OrcaserveError as error:
                if state.begun and not state.resume:
                    raise
                await asyncio.sleep(attempts.failed(error))

    async def _once(self, url: str) -> AsyncGenerator[Chunk | None, None]:
        """One connection, as far as it goes. Raises OrcaserveError."""
        client, state = self._client, self._state
        parser = SseParser()
        try:
            async with client._http.stream(
                "POST", url + self._path, json=state.next_body(), headers=client._headers
            ) as response:
                state.request_id = response.headers.get("x-request-id", "")
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for data in response.aiter_bytes():
                    for event in parser.feed(data):
                        yield state.take(event)
                        if state.done:
                            return
        except httpx.TransportError as error:
            raise transport_error(error) from error
        raise IncompleteStream("the stream ended without [DONE]")

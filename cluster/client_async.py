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

from orcaserve.cluster import client_calls as calls
from orcaserve.cluster.client_base import DEFAULT_TIMEOUT, DEFAULT_URL, ClientBase
from orcaserve.cluster.client_calls import Answer, Call, Messages, Prompt
from orcaserve.cluster.client_errors import IncompleteStream, OrcaserveError, error_of, transport_errors
from orcaserve.cluster.client_options import ChatOptions, CompletionOptions
from orcaserve.cluster.client_retry import RetryPolicy
from orcaserve.cluster.client_stream import Chunk, StreamState
from orcaserve.cluster.protocol_responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterStatusResponse,
    Completion,
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
        return await self._ask(calls.chat(messages, options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue one or several prompts."""
        return await self._ask(calls.completion(prompt, options))

    def stream_chat(
        self, messages: Messages, *, resume: bool = False, **options: Unpack[ChatOptions]
    ) -> AsyncChunkStream[ChatCompletionChunk]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        body = calls.chat_body(messages, options)
        return AsyncChunkStream(self, StreamState(ChatCompletionChunk, calls.CHAT_PATH, body, resume, self._rng))

    def stream_complete(
        self, prompt: Prompt, *, resume: bool = False, **options: Unpack[CompletionOptions]
    ) -> AsyncChunkStream[Completion]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        body = calls.completion_body(prompt, options)
        return AsyncChunkStream(self, StreamState(Completion, calls.COMPLETION_PATH, body, resume, self._rng))

    async def models(self) -> ModelList:
        """What is served."""
        return await self._ask(calls.MODELS)

    async def tokenize(self, text: str | Messages, **options: Any) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        return await self._ask(calls.tokenize(text, options))

    async def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of token ids."""
        return (await self._ask(calls.detokenize(tokens, options))).prompt

    async def health(self) -> HealthResponse:
        """Is it alive? Raises ServerFailed when not."""
        return await self._ask(calls.HEALTH)

    async def ready(self) -> HealthResponse:
        """Can it answer? Raises ServerFailed when not."""
        return await self._ask(calls.READY)

    async def cluster_status(self) -> ClusterStatusResponse:
        """Groups, queue and cache at this moment."""
        return await self._ask(calls.CLUSTER)

    async def _ask(self, call: Call[Answer]) -> Answer:
        attempts = self._attempts()
        while True:
            url = attempts.url + call.path
            try:
                with transport_errors():
                    response = await self._http.request(call.method, url, json=call.body, headers=self._headers)
                answer = call.read(response)
            except OrcaserveError as error:
                await asyncio.sleep(attempts.failed(error))
            else:
                self._succeeded(attempts)
                return answer


class AsyncChunkStream(Generic[Chunk]):
    """Iterate it once. Leaving the loop early closes the connection, and the server stops working on it."""

    def __init__(self, client: AsyncClient, state: StreamState[Chunk]) -> None:
        self._client = client
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
        state, attempts = self._state, self._client._attempts()
        while not state.done:
            try:
                async with aclosing(self._once(attempts.url)) as chunks:
                    async for chunk in chunks:
                        self._client._succeeded(attempts)
                        if chunk is not None:
                            yield chunk
            except OrcaserveError as error:
                await asyncio.sleep(state.wait_s(error, attempts))

    async def _once(self, url: str) -> AsyncGenerator[Chunk | None, None]:
        """One connection, as far as it goes. Raises OrcaserveError."""
        http, headers, state = self._client._http, self._client._headers, self._state
        with transport_errors():
            async with http.stream("POST", url + state.path, json=state.next_body(), headers=headers) as response:
                if not state.opened(response):
                    await response.aread()
                    raise error_of(response)
                async for data in response.aiter_bytes():
                    for chunk in state.feed(data):
                        yield chunk
                    if state.done:
                        return
        raise IncompleteStream("the stream ended without [DONE]")

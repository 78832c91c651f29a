"""The Python client: `from orcaserve import Client`. It needs httpx and pydantic, nothing of the server.

client = Client("http://127.0.0.1:8000")
print(client.chat([{"role": "user", "content": "Hello!"}]).text)
for chunk in client.stream_chat([{"role": "user", "content": "Hello!"}], resume=True):
    print(chunk.text, end="")
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
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


class Client(ClientBase):
    """Blocking client. Use it with `with`, or call `close`. Methods raise OrcaserveError (see client_errors)."""

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = None,
        http: httpx.Client | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(base_url, api_key=api_key, timeout=timeout, retry=retry, rng=rng)
        self._http = http or httpx.Client(timeout=timeout)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Continue a conversation."""
        return self._ask(calls.chat(messages, options))

    def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue one or several prompts."""
        return self._ask(calls.completion(prompt, options))

    def stream_chat(
        self, messages: Messages, *, resume: bool = False, **options: Unpack[ChatOptions]
    ) -> ChunkStream[ChatCompletionChunk]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        body = calls.chat_body(messages, options)
        return ChunkStream(self, StreamState(ChatCompletionChunk, calls.CHAT_PATH, body, resume, self._rng))

    def stream_complete(
        self, prompt: Prompt, *, resume: bool = False, **options: Unpack[CompletionOptions]
    ) -> ChunkStream[Completion]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        body = calls.completion_body(prompt, options)
        return ChunkStream(self, StreamState(Completion, calls.COMPLETION_PATH, body, resume, self._rng))

    def models(self) -> ModelList:
        """What is served."""
        return self._ask(calls.MODELS)

    def tokenize(self, text: str | Messages, **options: Any) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        return self._ask(calls.tokenize(text, options))

    def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of token ids."""
        return self._ask(calls.detokenize(tokens, options)).prompt

    def health(self) -> HealthResponse:
        """Is it alive? Raises ServerFailed when not."""
        return self._ask(calls.HEALTH)

    def ready(self) -> HealthResponse:
        """Can it answer? Raises ServerFailed when not."""
        return self._ask(calls.READY)

    def cluster_status(self) -> ClusterStatusResponse:
        """Groups, queue and cache at this moment."""
        return self._ask(calls.CLUSTER)

    def _ask(self, call: Call[Answer]) -> Answer:
        attempts = self._attempts()
        while True:
            url = attempts.url + call.path
            try:
                with transport_errors():
                    response = self._http.request(call.method, url, json=call.body, headers=self._headers)
                answer = call.read(response)
            except OrcaserveError as error:
                time.sleep(attempts.failed(error))
            else:
                self._succeeded(attempts)
                return answer


class ChunkStream(Generic[Chunk]):
    """Iterate it once. Leaving the loop early closes the connection, and the server stops working on it."""

    def __init__(self, client: Client, state: StreamState[Chunk]) -> None:
        self._client = client
        self._state: StreamState[Chunk] = state
        self._chunks: Generator[Chunk, None, None] = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        try:
            yield from self._chunks
        finally:
            self.close()

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; nothing happens when it is over already."""
        self._chunks.close()

    @property
    def text(self) -> Iterator[str]:
        """Only the text of the chunks."""
        return (chunk.text for chunk in self if chunk.text)

    def _run(self) -> Generator[Chunk, None, None]:
        state, attempts = self._state, self._client._attempts()
        while not state.done:
            try:
                with closing(self._once(attempts.url)) as chunks:
                    for chunk in chunks:
                        self._client._succeeded(attempts)
                        if chunk is not None:
                            yield chunk
            except OrcaserveError as error:
                time.sleep(state.wait_s(error, attempts))

    def _once(self, url: str) -> Generator[Chunk | None, None, None]:
        """One connection, as far as it goes. Raises OrcaserveError."""
        http, headers, state = self._client._http, self._client._headers, self._state
        body = state.next_body()
        with transport_errors(), http.stream("POST", url + state.path, json=body, headers=headers) as response:
            if not state.opened(response):
                response.read()
                raise error_of(response)
            for data in response.iter_bytes():
                yield from state.feed(data)
                if state.done:
                    return
        raise IncompleteStream("the stream ended without [DONE]")

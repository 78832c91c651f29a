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
        return self._post(ChatCompletion, "/v1/chat/completions", chat_body(messages, options))

    def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue one or several prompts."""
        return self._post(Completion, "/v1/completions", completion_body(prompt, options))

    def stream_chat(
        self, messages: Messages, *, resume: bool = False, **options: Unpack[ChatOptions]
    ) -> ChunkStream[ChatCompletionChunk]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        state = StreamState(ChatCompletionChunk, chat_body(messages, options), resume, self._rng)
        return ChunkStream(self, "/v1/chat/completions", state)

    def stream_complete(
        self, prompt: Prompt, *, resume: bool = False, **options: Unpack[CompletionOptions]
    ) -> ChunkStream[Completion]:
        """Chunks as they come. With `resume`, a broken stream goes on where it stopped."""
        return ChunkStream(
            self, "/v1/completions", StreamState(Completion, completion_body(prompt, options), resume, self._rng)
        )

    def models(self) -> ModelList:
        """What is served."""
        return self._get(ModelList, "/v1/models")

    def tokenize(self, text: str | Messages, **options: Any) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        field = {"prompt": text} if isinstance(text, str) else {"messages": [dict(message) for message in text]}
        return self._post(TokenizeResponse, "/tokenize", field | options)

    def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of token ids."""
        return self._post(DetokenizeResponse, "/detokenize", {"tokens": list(tokens)} | options).prompt

    def health(self) -> HealthResponse:
        """Is it alive? Raises ServerFailed when not."""
        return self._get(HealthResponse, "/health")

    def ready(self) -> HealthResponse:
        """Can it answer? Raises ServerFailed when not."""
        return self._get(HealthResponse, "/ready")

    def cluster_status(self) -> ClusterStatusResponse:
        """Groups, queue and cache at this moment."""
        return self._get(ClusterStatusResponse, "/cluster")

    def _get(self, model: type[Model], path: str) -> Model:
        return self._request(model, "GET", path, None)

    def _post(self, model: type[Model], path: str, body: dict[str, Any]) -> Model:
        return self._request(model, "POST", path, body)

    def _request(self, model: type[Model], method: str, path: str, body: dict[str, Any] | None) -> Model:
        attempts = self._attempts()
        while True:
            try:
                try:
                    response = self._http.request(method, attempts.url + path, json=body, headers=self._headers)
                except httpx.TransportError as error:
                    raise transport_error(error) from error
                return self._answer(model, response, attempts)
            except OrcaserveError as error:
                time.sleep(attempts.failed(error))


class ChunkStream(Generic[Chunk]):
    """Iterate it once. Leaving the loop early closes the connection, and the server stops working on it."""

    def __init__(self, client: Client, path: str, state: StreamState[Chunk]) -> None:
        self._client = client
        self._path = path
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
        state = self._state
        attempts = self._client._attempts()
        while not state.done:
            try:
                with closing(self._once(attempts.url)) as chunks:
                    for chunk in chunks:
                        if state.progressed:
                            attempts.succeeded()
                            self._client._preferred = attempts.index
                        if chunk is not None:
                            yield chunk
            except OrcaserveError as error:
                if state.begun and not state.resume:
                    raise
                time.sleep(attempts.failed(error))

    def _once(self, url: str) -> Generator[Chunk | None, None, None]:
        """One connection, as far as it goes. Raises OrcaserveError."""
        client, state = self._client, self._state
        parser = SseParser()
        try:
            with client._http.stream(
                "POST", url + self._path, json=state.next_body(), headers=client._headers
            ) as response:
                state.request_id = response.headers.get("x-request-id", "")
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                for data in response.iter_bytes():
                    for event in parser.feed(data):
                        yield state.take(event)
                        if state.done:
                            return
        except httpx.TransportError as error:
            raise transport_error(error) from error
        raise IncompleteStream("the stream ended without [DONE]")

"""The client against servers that misbehave on purpose (case 39), and against a live one that is cut off."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orcaserve import AsyncClient, Client
from orcaserve.cluster.client_errors import (
    BadRequest,
    ConnectionFailed,
    IncompleteStream,
    NotFound,
    RateLimited,
    ServerFailed,
    StreamFailed,
    TimedOut,
)
from orcaserve.cluster.client_retry import Attempts, RetryPolicy
from orcaserve.cluster.client_sse import Event, SseParser
from tests.cluster.live import LiveServer

HI = [{"role": "user", "content": "SAY:one two three four five six seven"}]
SAID = "one two three four five six seven"
QUICK = RetryPolicy(max_retries=3, first_delay_s=0.001, max_delay_s=0.002)


def chunk(text: str, finish: str | None = None, index: int = 0) -> str:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class ScriptedServer:
    """Answers each connection with the next script: bytes to send, and pauses; then hangs up."""

    def __init__(self, *scripts: list[bytes | float]) -> None:
        self._scripts = list(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.times.append(time.monotonic())
                self.requests.append(self._read(connection))
                try:
                    for step in script:
                        if isinstance(step, float):
                            time.sleep(step)
                        else:
                            connection.sendall(step)
                except OSError:
                    pass  # the client left

    def _read(self, connection: socket.socket) -> dict[str, Any]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length")), 0)
        while len(body) < length:
            body += connection.recv(65536)
        return json.loads(body) if body else {}

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def make(*scripts: list[bytes | float]) -> ScriptedServer:
        servers.append(ScriptedServer(*scripts))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def stream_head() -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def status(code: int, headers: str = "", body: dict[str, Any] | None = None) -> list[bytes | float]:
    data = json.dumps(body or {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}).encode()
    head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n"
    head += "Connection: close\r\n\r\n"
    return [head.encode() + data]


DONE = b"data: [DONE]\n\n"


def test_case_39_comments_empty_data_crlf_and_split_characters(scripted: Callable[..., ScriptedServer]) -> None:
    fox = chunk("🦊").replace("\n", "\r\n").encode()
    cut = fox.index("🦊".encode()) + 2
    server = scripted(
        [
            stream_head(),
            b": ping\n\n",
            b"data:\n\n",
            b"data: \r\n\r\n",
            fox[:cut],
            0.02,
            fox[cut:-1],
            0.02,
            fox[-1:],
            DONE,
        ]
    )
    with Client(server.url, retry=QUICK) as client:
        assert [c.text for c in client.stream_chat(HI)] == ["🦊"]


@given(text=st.text("ab🦊\r\n: data", max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_case_39_events_do_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    raw = f": c\r\ndata: {text}\r\n\r\nevent: error\ndata: 1\ndata: 2\n\n".encode()
    whole = list(SseParser().feed(raw))
    parser, parts, at = SseParser(), [], 0
    for cut in sorted(cuts):
        parts += parser.feed(raw[at : min(cut, len(raw))])
        at = max(at, min(cut, len(raw)))
    parts += parser.feed(raw[at:])
    assert parts == whole
    assert whole[-1] == Event("error", "1\n2")


def test_case_39_an_error_event_is_a_typed_error(scripted: Callable[..., ScriptedServer]) -> None:
    event = (
        b'event: error\ndata: {"error":{"message":"lost","type":"server_error","param":null,"code":"unavailable"}}\n\n'
    )
    server = scripted([stream_head(), chunk("a").encode(), event], [stream_head(), chunk("again").encode(), DONE])
    with Client(server.url, retry=QUICK) as client:
        stream = client.stream_chat(HI)
        assert next(stream).text == "a"
        with pytest.raises(StreamFailed) as error:
            next(stream)
    assert (error.value.code, error.value.message) == ("unavailable", "lost")
    assert len(server.requests) == 1  # nothing is tried again after the first byte


@pytest.mark.parametrize("ending", [b"", chunk("half").encode()[:20]])
def test_case_39_a_stream_without_its_end_mark(scripted: Callable[..., ScriptedServer], ending: bytes) -> None:
    server = scripted([stream_head(), chunk("a").encode(), ending])
    with Client(server.url, retry=QUICK) as client:
        stream = client.stream_chat(HI)
        assert next(stream).text == "a"
        with pytest.raises(IncompleteStream):
            next(stream)
    assert len(server.requests) == 1


def test_case_39_leaving_early_gives_the_connection_back(server: LiveServer) -> None:
    limits = httpx.Limits(max_connections=2)
    with httpx.Client(limits=limits, timeout=httpx.Timeout(5, pool=1)) as http, Client(server.url, http=http) as client:
        for _ in range(5):
            stream = client.stream_chat(HI, max_tokens=400, ignore_eos=True)
            for each in stream:
                assert each.choices
                break
        assert client.chat(HI).text == SAID
    server.until_idle()


def test_case_39_leaving_early_async(server: LiveServer) -> None:
    async def run() -> None:
        limits = httpx.Limits(max_connections=2)
        async with (
            httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(5, pool=1)) as http,
            AsyncClient(server.url, http=http) as client,
        ):
            for _ in range(5):
                async with client.stream_chat(HI, max_tokens=400, ignore_eos=True) as stream:
                    async for each in stream:
                        assert each.choices
                        break
            assert (await client.chat(HI)).text == SAID

    asyncio.run(run())
    server.until_idle()


def test_case_39_cancellation_passes_through_a_retry(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted(status(503, "Retry-After: 30\r\n"))

    async def run() -> None:
        async with AsyncClient(server.url, retry=RetryPolicy(first_delay_s=30, max_delay_s=30)) as client:
            task = asyncio.create_task(client.chat(HI))
            async with asyncio.timeout(60):
                while not server.requests:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


@pytest.mark.parametrize("code", [429, 503])
def test_case_39_retry_after_is_honoured(scripted: Callable[..., ScriptedServer], code: int) -> None:
    answer = {"id": "x", "created": 1, "model": "m", "choices": [{"index": 0, "message": {"content": "ok"}}]}
    server = scripted(status(code, "Retry-After: 1\r\n"), status(200, body=answer))
    with Client(server.url, retry=QUICK) as client:
        assert client.chat(HI).text == "ok"
    assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize(("code", "kind"), [(400, BadRequest), (404, NotFound), (413, BadRequest), (422, BadRequest)])
def test_case_39_what_cannot_work_is_not_tried_again(
    scripted: Callable[..., ScriptedServer], code: int, kind: type[Exception]
) -> None:
    server = scripted(status(code), status(code))
    with Client(server.url, retry=QUICK) as client, pytest.raises(kind) as error:
        client.chat(HI)
    assert len(server.requests) == 1
    assert (error.value.status, error.value.param, error.value.code) == (code, "p", "c")  # type: ignore[attr-defined]


def test_tries_end(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted(*[status(503) for _ in range(4)])
    with Client(server.url, retry=QUICK) as client, pytest.raises(ServerFailed):
        client.chat(HI)
    assert len(server.requests) == 4
    limited = scripted(status(429, "Retry-After: 600\r\n"))
    with Client(limited.url, retry=QUICK) as client, pytest.raises(RateLimited) as error:
        client.chat(HI)
    assert error.value.retry_after_s == 600


def test_timeouts_are_typed(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted([2.0])
    with Client(server.url, retry=QUICK, timeout=0.1) as client, pytest.raises(TimedOut):
        client.chat(HI)
    with Client("http://127.0.0.1:9", retry=QUICK) as client, pytest.raises(ConnectionFailed):
        client.chat(HI)


def test_failover_goes_to_the_next_server_at_once(server: LiveServer, scripted: Callable[..., ScriptedServer]) -> None:
    broken = scripted(status(503, "Retry-After: 60\r\n"))
    slow = RetryPolicy(first_delay_s=20, max_delay_s=20)
    with Client(["http://127.0.0.1:9", broken.url, server.url + "/v1/"], retry=slow) as client:
        assert client.chat(HI).text == SAID
        assert "".join(client.stream_chat(HI).text) == SAID  # and stays there
    assert len(broken.requests) == 1


@given(st.lists(st.sampled_from(["down", "busy"]), max_size=12), st.integers(1, 4))
def test_attempts_are_bounded_and_try_everyone(failures: list[str], num_urls: int) -> None:
    attempts = Attempts([f"u{i}" for i in range(num_urls)], RetryPolicy(max_retries=3), random.Random(0))
    tried = []
    for kind in failures:
        tried.append(attempts.url)
        error = ConnectionFailed("x") if kind == "down" else RateLimited("x", status=429, retry_after_s=2.0)
        try:
            wait_s = attempts.failed(error)
        except (ConnectionFailed, RateLimited):
            break
        assert wait_s >= 2.0 if kind == "busy" else wait_s >= 0
    assert len(tried) <= 3 + num_urls
    if failures and len(tried) >= num_urls and "busy" not in failures:
        assert set(tried[:num_urls]) == {f"u{i}" for i in range(num_urls)}


def test_every_method(server: LiveServer) -> None:
    with Client(server.url) as client:
        assert client.models().data[0].id == server.model.name
        assert client.health().status == "ok"
        assert client.ready().status == "ready"
        assert client.cluster_status().ready
        tokens = client.tokenize("héllo").tokens
        assert client.detokenize(tokens) == "héllo"
        assert client.tokenize(HI, add_generation_prompt=True).count > 10
        assert client.complete(["SAY:a", "SAY:b"], max_tokens=3).choices[1].text == "b"
        assert client.complete(tokens, max_tokens=1).usage.completion_tokens == 1  # type: ignore[union-attr]
        with pytest.raises(NotFound) as error:
            client.chat(HI, model="nope")
        assert error.value.request_id
    with pytest.raises(ValueError, match="base_url"):
        Client([])


def test_the_client_needs_httpx_and_pydantic_alone() -> None:
    code = (
        "import sys; from orcaserve import Client, AsyncClient;"
        "server = {'msgspec', 'fastapi', 'starlette', 'ray', 'torch', 'numpy', 'zmq', 'tokenizers', 'jinja2', 'yaml'};"
        "print(sorted(server & {name.split('.')[0] for name in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

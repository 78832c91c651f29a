"""A lean HTTP/1.1 client for many event streams: one asyncio protocol per connection, no task and no queue per chunk.

Why not httpx: at 256 streams the client must not be what is measured. See `tests/loadtest/test_http_stream.py` for the
check, and the note in README's load-test section for the ratio of the two clients in one run.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

OnEvent = Callable[[bytes, float], bool]  # one SSE data payload and when it came; False: hang up now


class HttpFault(Exception):
    """The connection broke, or what came back is not HTTP."""


class ServerFailed(Exception):
    """A server that a measurement started did not come up, or failed requests under it."""


class ResponseParser:
    """Bytes in, body bytes out (sans I/O): status line, headers, then a chunked, counted or until-close body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.keep_alive = True
        self._buffer = b""
        self._in_body = False
        self._left = -1  # bytes of the body (or of this chunk) still to come; -1: until the connection closes
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` completes."""
        self._buffer += data
        if not self._in_body and not self._read_head():
            return b""
        return self._read_chunks() if self._chunked else self._read_counted()

    def feed_eof(self) -> None:
        """The peer closed: the end of an uncounted body, a fault anywhere else."""
        if self._in_body and not self._chunked and self._left < 0:
            self.done, self.keep_alive = True, False
        if not self.done:
            raise HttpFault("connection closed before the response was complete")

    def _read_head(self) -> bool:
        head, gap, rest = self._buffer.partition(b"\r\n\r\n")
        if not gap:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise HttpFault(f"not an HTTP/1.1 status line: {first[:80]!r}")
        self._buffer = rest
        self.status = int(parts[1])
        if self.status == 100:
            return self._read_head()
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        self.keep_alive = self.headers.get("connection", "").lower() != "close" and parts[0] != "HTTP/1.0"
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._left = 0 if self._chunked else int(self.headers.get("content-length", -1))
        self._in_body = True
        return True

    def _read_counted(self) -> bytes:
        body, self._buffer = self._buffer, b""
        if self._left >= 0:
            self._left -= len(body)
            self.done = self._left <= 0
        return body

    def _read_chunks(self) -> bytes:
        """Each chunk: size in hexadecimal, CRLF, that many bytes, CRLF; a size of 0 ends the body."""
        buffer, at, out = self._buffer, 0, []
        while True:
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(buffer[at:line_end].split(b";", 1)[0] or b"0", 16)
            start = line_end + 2
            if size == 0:
                self.done = buffer.find(b"\r\n", start) >= 0
                break
            if len(buffer) < start + size + 2:
                break
            out.append(buffer[start : start + size])
            at = start + size + 2
        self._buffer = buffer[at:]
        return b"".join(out)


class EventSplitter:
    """Body bytes in, `data:` payloads of server-sent events out; comments, other fields and empty data are skipped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data.replace(b"\r\n", b"\n") if b"\r" in data else data
        *events, self._buffer = self._buffer.split(b"\n\n")
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            else:
                lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if joined := b"\n".join(lines):
                    payloads.append(joined)
        return payloads


class Connection(asyncio.Protocol):
    """One keep-alive connection; carries one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._events = EventSplitter()
        self._on_event: OnEvent | None = None
        self._finished: asyncio.Future[None] | None = None
        self.body = bytearray()  # of a response that is not an event stream
        self.closed = False

    @property
    def parser(self) -> ResponseParser:
        return self._parser

    async def request(self, head_and_body: bytes, on_event: OnEvent) -> ResponseParser:
        """Send, hand each event to `on_event` as it arrives, return when the response is complete or was hung up."""
        assert self._transport is not None
        self._parser, self._events, self._on_event = ResponseParser(), EventSplitter(), on_event
        self.body = bytearray()
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(head_and_body)
        try:
            await self._finished
        except asyncio.CancelledError:
            self.close()
            raise
        return self._parser

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        try:
            body = self._parser.feed(data)
        except (HttpFault, ValueError) as error:
            self._finish(HttpFault(str(error)))
            self.close()
            return
        if self._parser.headers.get("content-type", "").startswith("text/event-stream"):
            for payload in self._events.feed(body):
                if self._on_event is not None and not self._on_event(payload, now):
                    self.close()
                    self._finish(None)
                    return
        else:
            self.body += body
        if self._parser.done:
            if not self._parser.keep_alive:
                self.close()
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        try:
            self._parser.feed_eof()
        except HttpFault as fault:
            self._finish(HttpFault(str(exc)) if exc else fault)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._finished is None or self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)


class StreamClient:
    """A pool of connections to one server. `clock` stamps each event on arrival."""

    def __init__(self, base_url: str, api_key: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be http(s)://host[:port], got {base_url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nAccept: text/event-stream, application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._clock = clock
        self._idle: deque[Connection] = deque()

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> tuple[int, bytes]:
        """POST JSON; returns (status, body unless it was an event stream). Raises HttpFault or OSError."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
        return await self._send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, on_event)

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET; returns (status, body)."""
        return await self._send(
            f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(), lambda _data, _at: True
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _send(self, message: bytes, on_event: OnEvent) -> tuple[int, bytes]:
        """On an idle connection, or on a new one if the server hung up on that one before it read the request."""
        while connection := self._take_idle():
            try:
                return await self._exchange(connection, message, on_event)
            except HttpFault:
                if connection.parser.status:
                    raise
        return await self._exchange(await self._connect(), message, on_event)

    async def _exchange(self, connection: Connection, message: bytes, on_event: OnEvent) -> tuple[int, bytes]:
        parser = await connection.request(message, on_event)
        if not connection.closed:
            self._idle.append(connection)
        return parser.status, bytes(connection.body)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
        )
        return connection


async def first_answer(url: str, body: bytes, timeout_s: float, has_died: Callable[[], bool] = lambda: False) -> None:
    """Wait until a server that is starting answers this completion. Raises ServerFailed."""
    deadline = time.monotonic() + timeout_s
    while True:
        client = StreamClient(url)
        try:
            status, _ = await client.post("/v1/completions", body, lambda _data, _at: True)
            if status == 200:
                return
        except (HttpFault, OSError):
            pass
        finally:
            client.close()
        if has_died():
            raise ServerFailed(f"the server ended before it answered at {url}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"no answer at {url} after {timeout_s:g} s")
        await asyncio.sleep(0.2)

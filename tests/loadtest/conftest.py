"""A small OpenAI-compatible peer with known timing, for tests of the client: raw asyncio, its own thread and loop.

It answers /v1/models, /v1/completions and /v1/chat/completions as server-sent events; what it streams and when follows
from the request (`max_tokens` chunks) and from the knobs below. It notes when it wrote each chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Peer:
    first_delay_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    fail_every: int = 0  # each n-th request gets a 503
    fault: str = ""  # "truncate": closes mid-stream; "error-event"; "no-usage"
    close_after_response: bool = False  # sends Connection: keep-alive and yet hangs up when idle
    bodies: list[dict[str, Any]] = field(default_factory=list)
    writes_s: list[list[float]] = field(default_factory=list)
    hang_ups: int = 0
    url: str = ""

    def __enter__(self) -> Peer:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    (int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0
                )
                body = await reader.readexactly(length)
                if head.startswith("GET /v1/models"):
                    self._reply(writer, 200, {"data": [{"id": "tiny"}]})
                elif head.startswith("POST"):
                    await self._stream(writer, json.loads(body), "chat" in head.split(" ")[1])
                else:
                    self._reply(writer, 404, {"error": {"message": "no such route"}})
                await writer.drain()
                if self.close_after_response:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _reply(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            self._reply(writer, 503, {"error": {"message": "busy"}})
            return
        writes: list[float] = []
        self.writes_s.append(writes)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]} if chat else {"choices": []})
        await asyncio.sleep(self.first_delay_s)
        total = body["max_tokens"]
        for number, start in enumerate(range(0, total, self.tokens_per_chunk)):
            if number:
                await asyncio.sleep(self.gap_s)
            if writer.is_closing() or writer.transport.is_closing():
                self.hang_ups += 1
                return
            text = "word " * min(self.tokens_per_chunk, total - start)
            writes.append(time.perf_counter())
            self._event(writer, {"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            await writer.drain()
            if self.fault == "truncate" and number == 1:
                writer.close()
                return
            if self.fault == "error-event" and number == 1:
                self._event(writer, {"error": {"message": "worker died", "code": 500}})
        prompt = body.get("prompt") or body["messages"]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if self.fault != "no-usage":
            self._event(writer, {"choices": [], "usage": usage})
        self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        self._write(writer, b"data: " + json.dumps(content).encode() + b"\n\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Starts peers with the given knobs; stops them when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **knobs: stack.enter_context(Peer(**knobs))

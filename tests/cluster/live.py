"""A whole server in this process, on a real socket: HTTP, router, stream, channel, scheduler, channel, rank.

Only Ray is missing (and, with a Parrot, the model). The event loop lives in a thread, so that tests can use the sync
clients that users use.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import uvicorn

from orcaserve.cluster.app import Surface
from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.channel import Endpoint
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.service import SchedulerService
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import ClusterStatus, GroupStatus, View
from orcaserve.engine.config import SchedulerConfig
from tests.cluster.parrot import Parrot, RankThread
from tests.waiting import eventually

T = TypeVar("T")


class PatientStream(EngineStream):
    """On a busy machine an answer may take longer than a client would wait."""

    async def status(self, timeout_s: float = 60.0) -> ClusterStatus:
        return await super().status(timeout_s)

    async def view(self, after: int | None = None, traced: bool = False, timeout_s: float = 60.0) -> View:
        return await super().view(after, traced, timeout_s)


class LiveServer:
    """Start with `with`; `url` is its address, `client` an httpx client on it."""

    def __init__(
        self,
        model: ModelInfo,
        worker: Any,
        config: AppConfig | None = None,
        *,
        num_blocks: int = 512,
        **scheduler: Any,
    ) -> None:
        self.model = model
        self.worker = worker
        self._config = config or AppConfig()
        self._num_blocks = num_blocks
        self._scheduler_config = SchedulerConfig(
            max_model_len=model.max_model_len, eos_token_ids=model.eos_token_ids, **scheduler
        )
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self.state = "ready"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(120)
        if self._error is not None:
            raise self._error
        self.client = httpx.Client(base_url=self.url, timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()
            self._loop.close()

    async def _main(self) -> None:
        self.service = SchedulerService(
            self._scheduler_config,
            "127.0.0.1",
            60.0,
            time.monotonic,
            on_group_lost=lambda group_id, reason: None,
            status=self._status,
        )
        complete = self.service.expect_group(0, "a", 1)
        rank = await asyncio.to_thread(RankThread, self.service.rank_endpoint, self.worker)
        await complete.wait()
        self.service.open_group(0, self._num_blocks)
        self.stream: EngineStream = PatientStream(self._locate)
        await self.stream.start()
        self.surface = Surface(self._config, self.model, self.stream)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(self.surface.asgi, log_level="warning", lifespan="off", timeout_keep_alive=600)
        )
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        self._ready.set()
        await self._stop.wait()
        server.should_exit = True
        server.force_exit = True
        await serving
        await self.stream.close()
        await self.surface.close()
        self.service.close("the test is over")
        if isinstance(self.worker, Parrot):
            self.worker.gate.set()
        await asyncio.to_thread(rank.thread.join, 10)

    async def _locate(self) -> Endpoint:
        return self.service.router_endpoint

    def _status(self) -> ClusterStatus:
        state: Any = self.state
        group = GroupStatus(0, state, "", self._num_blocks, 1 if state == "ready" else 2, [], [], "", 0.0)
        stats = self.service.scheduler.stats()
        return ClusterStatus(state == "ready", False, [group], stats, 1, 0, 0, 0, 0.0, 0)

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the server's loop."""

        async def run() -> T:
            return function()

        return self.wait(run())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    @property
    def load(self) -> tuple[int, int, int]:
        """Running, waiting, used blocks."""
        stats = self.call(self.service.scheduler.stats)
        return stats.running, stats.waiting, sum(group.used_blocks for group in stats.groups)

    def until_idle(self, within_s: float = 30.0) -> None:
        """Wait for nothing to be left on the engine."""
        eventually(lambda: self.load == (0, 0, 0) and self.call(lambda: self.stream.num_held) == 0, within_s)

    # Short cuts

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        return self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "temperature": 0} | fields
        )

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | fields)

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of all server-sent events."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode()
        return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


@contextmanager
def users(server: LiveServer, num_users: int, key: str = "") -> Iterator[None]:
    """So many clients that always have a stream open."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    stop = threading.Event()

    def use(number: int) -> None:
        body = {"prompt": "word " * (10 + number * 7 % 60), "stream": True, "max_tokens": 30, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
            while not stop.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for _ in response.iter_lines():
                        if stop.is_set():
                            break

    threads = [threading.Thread(target=use, args=(number,)) for number in range(num_users)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)

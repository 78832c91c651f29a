"""A start that meets an obstacle, an end in which all is told to go at once, and ends that nobody asked for."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.serve import _Service
from orcaserve.loadtest.serving import Serving, still_alive
from orcaserve.workers import demo
from tests.waiting import eventually

# `orcaserve serve`, except that a stranger sits on a port of its proxy until Ray Serve has given that proxy up.
OBSTRUCTED = """
import socket, sys
from orcaserve import cli
from orcaserve.cluster import serve
from orcaserve.cluster.local import LocalRay

strangers = []

class Obstructed(LocalRay):
    def __init__(self):
        super().__init__()
        strangers.append(socket.create_server(("127.0.0.1", self._stats_port)))

def say(text):
    told(text)
    if "did not start" in text:
        strangers.pop().close()

told, cli._say = cli._say, say
serve.LocalRay = Obstructed
sys.argv[0] = "orcaserve"
cli.main()
"""


class ObstructedServing(Serving):
    program = ("-c", OBSTRUCTED)


# `orcaserve serve`, told to stop where a library drops the exception that comes of it.
DEAF = """
import os, signal, sys, time
from orcaserve import cli

def say(text):
    told(text)
    if "starting Ray Serve" in text:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            told("dropped")

told, cli._say = cli._say, say
sys.argv[0] = "orcaserve"
cli.main()
"""


class DeafServing(Serving):
    program = ("-c", DEAF)


def test_a_signal_whose_exception_is_dropped_stops_it_too() -> None:
    serving = DeafServing("--num-threads", "1", "--kv-cache-memory", "64MiB")
    assert serving.process.wait(180) == 0, serving.output
    serving.stop()
    assert "dropped" in serving.output
    assert "ready after" not in serving.output
    assert "Traceback" not in serving.output


def wait_until_gone(processes: dict[int, str], within_s: float) -> None:
    eventually(lambda: not still_alive(processes), within_s)


def test_a_proxy_that_did_not_start_delays_the_start_and_a_signal_to_all_ends_it() -> None:
    demo.pull("smollm2-135m")
    serving = ObstructedServing("--num-threads", "1", "--kv-cache-memory", "64MiB")
    try:
        serving.wait_ready(180)
        assert "did not start" in serving.output
        answer = serving.post("/v1/completions", {"prompt": "One, two,", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4

        processes = serving.processes()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until_gone(processes, 60)
    finally:
        serving.stop()


@pytest.mark.nightly  # Ray Serve tries each router three times, half a minute in all
def test_routers_that_cannot_start_are_one_line(tmp_path: Path) -> None:
    for file in demo.pull("smollm2-135m").iterdir():
        (tmp_path / file.name).symlink_to(file)
    serving = Serving(str(tmp_path), "--num-threads", "1", "--kv-cache-memory", "64MiB")
    eventually(lambda: "starting Ray" in serving.output, 60)  # what it has read itself was whole
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert serving.process.wait(180) == 1
    serving.stop()
    [error] = [line for line in serving.log if "error" in line]
    assert "the routers did not start: " in error
    assert "tokenizer.json" in error
    assert serving.log[-1] == error


def test_a_service_ends_with_its_ray(model: ModelInfo) -> None:
    serving = Serving("--num-threads", "1", "--kv-cache-memory", "64MiB")
    try:
        serving.wait_ready(180)
        processes = serving.processes()
        leave_with_a_late_scheduler(serving, model)

        [raylet] = [pid for pid, command in processes.items() if command.split()[0].endswith("/raylet")]
        os.kill(raylet, signal.SIGKILL)
        assert serving.process.wait(120) == 1
        assert still_alive(processes) == {}
    finally:
        serving.stop()
    assert "Ray has ended" in serving.output


def leave_with_a_late_scheduler(serving: Serving, model: ModelInfo) -> None:
    """Another process serves the same application on this Ray, and its scheduler answers `stop` when it is too late."""
    import ray

    class LateScheduler:
        def __init__(self) -> None:
            self._late = asyncio.Event()

        async def pid(self) -> int:
            return os.getpid()

        async def be_late(self) -> None:
            self._late.set()

        async def stop(self, drain_s: float) -> bool:
            return await self._late.wait()

    def say(text: str) -> None:
        said.append(text)
        scheduler.be_late.remote()

    said: list[str] = []
    ray.init(address=serving.ray_address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    scheduler: Any = ray.remote(LateScheduler).options(num_cpus=0, name="late", lifetime="detached").remote()
    pid = ray.get(scheduler.pid.remote())
    config = ServeConfig(ray_address=serving.ray_address, drain_timeout_s=0)
    service = _Service(config, model, None, say)
    service._scheduler = scheduler
    service.stop()
    assert said == ["the scheduler did not answer: GetTimeoutError"]
    wait_until_gone({pid: serving.processes().get(pid, "")}, 60)
    assert serving.get("/ready")[0] != 200

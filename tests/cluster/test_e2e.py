"""One real server, as `orcaserve serve` starts it: Ray, Serve, scheduler, two groups, the real model.

float32, so that a request's ids do not depend on what else is running, nor on who dies. Tests run in their order: the
last one stops the server.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import pickle
import random
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from orcaserve.cluster.channel import HEARTBEAT_TIMEOUT_MS
from orcaserve.cluster.scheduler_actor import connect
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import ClusterStatus
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import SamplingParams
from orcaserve.loadtest.chaos import Drill, DrillOptions, parse_kinds
from orcaserve.loadtest.faults import Injector
from orcaserve.loadtest.serving import Serving, still_alive
from orcaserve.workers import demo
from tests.waiting import eventually

T = TypeVar("T")
Case = tuple[tuple[int, ...], int, float]  # prompt, tokens to generate, temperature
CHAT = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
    "temperature": 0,
}
OPTIONS = (
    *("--dtype", "float32", "--groups", "2", "--num-threads", "1"),
    *("--kv-cache-memory", "128MiB", "--max-num-batched-tokens", "256", "--max-num-seqs", "64"),
    *("--drain-timeout-s", "12"),  # enough for 40 tokens on any machine, and for 1,900 on none
)


class Driver:
    """A router's stream of our own on the server's scheduler, in a loop of its own."""

    def __init__(self, serving: Serving) -> None:
        import ray

        ray.init(address=serving.ray_address, namespace="tests", log_to_driver=False, logging_level="ERROR")
        self.serving = serving
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.stream: EngineStream = self.run(self._open())
        self._undisturbed: dict[tuple[Case, ...], list[list[int]]] = {}

    async def _open(self) -> EngineStream:
        stream = connect("orcaserve")
        await stream.start()
        return stream

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        return self.start(work).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def status(self) -> ClusterStatus:
        return self.run(self.stream.status(timeout_s=60))

    async def generate(self, prompt: tuple[int, ...], num_tokens: int, temperature: float = 0.0) -> list[int]:
        """All ids of one answer. Raises if it does not end by its length."""
        sampling = SamplingParams(max_tokens=num_tokens, seed=7, temperature=temperature, ignore_eos=True)
        deltas = await self.stream.submit(GenerateRequest(f"t{random.getrandbits(64):x}", prompt, sampling))
        ids: list[int] = []
        async for delta in deltas:
            assert delta.finish_reason in (None, "length"), delta
            ids.extend(delta.token_ids)
        return ids

    async def _together(self, cases: tuple[Case, ...]) -> list[list[int]]:
        return await asyncio.gather(*(self.generate(*case) for case in cases))

    def undisturbed(self, *cases: Case) -> list[list[int]]:
        """The ids of these requests while all goes well."""
        if cases not in self._undisturbed:
            self._undisturbed[cases] = self.run(self._together(cases))
        return self._undisturbed[cases]

    def close(self) -> None:
        import ray

        self.run(self.stream.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        ray.shutdown()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    demo.pull("smollm2-135m")
    serving = Serving(*OPTIONS)
    try:
        serving.wait_ready(240)
        yield serving
    finally:
        serving.stop()


@pytest.fixture(scope="module")
def driver(serving: Serving) -> Iterator[Driver]:
    driver = Driver(serving)
    eventually(lambda: [g.state for g in driver.status().groups] == ["ready", "ready"], 240)
    yield driver
    driver.close()


def prompts_of(*lengths: int) -> list[tuple[int, ...]]:
    noise = np.random.default_rng(5)
    return [tuple(noise.integers(100, 40_000, length).tolist()) for length in lengths]


def is_idle(driver: Driver) -> bool:
    stats = driver.status().scheduler
    return stats.running == stats.waiting == 0 and all(group.used_blocks == 0 for group in stats.groups)


def all_ready(driver: Driver) -> bool:
    status = driver.run(_status_or_none(driver.stream))
    return status is not None and [group.state for group in status.groups] == ["ready", "ready"]


async def _status_or_none(stream: EngineStream) -> ClusterStatus | None:
    from orcaserve.engine.errors import Unavailable

    try:
        return await stream.status(timeout_s=60)
    except Unavailable:
        return None


class Crowd:
    """Streams that are under way while something happens to the server."""

    def __init__(self, driver: Driver, num_tokens: int = 100) -> None:
        prompts = prompts_of(5, 9, 17, 30, 40, 3, 12, 21)
        cases = [(p, num_tokens, 0.0 if i % 2 else 0.9) for i, p in enumerate(prompts)]
        self.expected = driver.undisturbed(*cases)
        before = driver.status().scheduler.generation_tokens
        self.futures = [driver.start(driver.generate(*case)) for case in cases]
        eventually(lambda: driver.status().scheduler.generation_tokens > before + len(cases) * 5, 60)

    def meets(self, sig: signal.Signals, pid: int) -> None:
        """The signal to that process comes among them."""
        os.kill(pid, sig)
        assert not all(future.done() for future in self.futures), "over before anything happened"

    def finish(self, within_s: float = 240.0) -> None:
        """Every stream must end with the ids of its undisturbed run: none lost, none twice."""
        assert [future.result(within_s) for future in self.futures] == self.expected


def test_answers_over_http(serving: Serving) -> None:
    answer = serving.post("/v1/chat/completions", CHAT)
    assert answer["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
    assert serving.get("/ready")[0] == 200
    assert serving.get("/health")[0] == 200


def test_greeting_is_a_curl_that_works(serving: Serving) -> None:
    import subprocess

    [command] = [line for line in serving.log if line.startswith("curl ")]
    answer = subprocess.run(["sh", "-c", f"{command.strip()} -s"], capture_output=True, text=True, check=True).stdout
    assert "The capital of Germany is Berlin." in answer


def test_listens_on_loopback_alone(serving: Serving) -> None:
    listeners: list[str] = []

    def door_is_seen() -> bool:  # not at the moment when one HAProxy takes it over from another
        listeners[:] = serving.listeners()
        return any(address.endswith(f":{serving.port}") for address in listeners)

    eventually(door_is_seen, 60)
    assert [a for a in listeners if not a.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:"))] == []


class Marker:
    """Leaves a file behind if anyone unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_case_34_bytes_on_our_ports_do_nothing(serving: Serving, driver: Driver, tmp_path: Path) -> None:
    pid = driver.status().scheduler_pid
    ports = [int(address.rpartition(":")[2]) for address in serving.listeners()]
    for port in ports:
        if port == serving.port:
            continue
        for junk in (random.Random(3).randbytes(1024), pickle.dumps(Marker(tmp_path / "ran"))):
            with (
                suppress(ConnectionRefusedError),  # one of an idle worker that Ray has ended meanwhile
                socket.create_connection(("127.0.0.1", port)) as raw,
            ):
                raw.sendall(junk)
    assert len(driver.run(driver.generate(prompts_of(8)[0], 8))) == 8
    assert not (tmp_path / "ran").exists()
    assert driver.status().scheduler_pid == pid


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((5, 400, 11, 80, 16, 33, 150, 7, 48, 64, 9, 21), id="12 streams"),
        pytest.param((*tuple(range(5, 1501, 24))[:62], 1500, 5), id="64 streams", marks=pytest.mark.nightly),
    ],
)
def test_many_streams_have_their_solo_ids(driver: Driver, lengths: tuple[int, ...]) -> None:
    cases = [(prompt, 12, 0.8 * (i % 2)) for i, prompt in enumerate(prompts_of(*lengths))]
    expected = [driver.run(driver.generate(*case)) for case in cases]

    async def together() -> list[list[int]]:
        tasks = []
        for case in cases:
            tasks.append(asyncio.ensure_future(driver.generate(*case)))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks)

    assert driver.run(together(), timeout_s=600) == expected
    eventually(lambda: is_idle(driver), 30)


def test_case_20_closed_streams_leave_nothing(serving: Serving, driver: Driver) -> None:
    """100 HTTP streams closed after their first token: no request, no block is left."""
    fields = {"model": CHAT["model"], "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    async def open_one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await reader.readuntil(b"data: ")
        return writer

    async def open_all() -> list[asyncio.StreamWriter]:
        return await asyncio.gather(*(open_one() for _ in range(100)))

    writers = driver.run(open_all())
    assert driver.status().scheduler.running > 0

    async def close_all() -> None:
        for writer in writers:
            writer.close()

    driver.run(close_all())
    eventually(lambda: is_idle(driver), 30)


def test_the_scheduler_comes_back_to_its_workers(serving: Serving, driver: Driver) -> None:
    before = driver.status()
    crowd = Crowd(driver)
    crowd.meets(signal.SIGKILL, before.scheduler_pid)
    crowd.finish()
    eventually(lambda: all_ready(driver), 180)
    after = driver.status()
    assert after.scheduler_pid != before.scheduler_pid
    assert [group.pids for group in after.groups] == [group.pids for group in before.groups]
    assert after.scheduler.prefix_cache_hits > 0  # what the workers had computed was found, not computed again
    eventually(lambda: serving.get("/ready")[0] == 200, 60)
    assert serving.post("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"].endswith("Berlin.")


def test_case_24_a_killed_worker_interrupts_nobody(serving: Serving, driver: Driver) -> None:
    """With a second group alive the streams go on at once, with what the dead one had computed for them; that one is
    built anew, its memory given back. The scheduler found both workers when it came, and introduced them anew."""
    victims, survivors = (group.pids for group in driver.status().groups)
    imported = driver.status().scheduler.num_imported_blocks
    crowd = Crowd(driver)
    crowd.meets(signal.SIGKILL, victims[0])
    eventually(lambda: driver.status().groups[0].state != "ready", HEARTBEAT_TIMEOUT_MS / 1000 - 2)  # it is not silence
    assert serving.get("/ready")[0] == 200
    crowd.finish()
    eventually(lambda: all_ready(driver), 180)
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims)
    assert driver.status().groups[0].num_starts == 2
    assert driver.status().scheduler.num_imported_blocks > imported
    pool = f"orcaserve-kv-{victims[0]}-"
    eventually(lambda: not any(pool in Path(f"/proc/{pid}/maps").read_text() for pid in survivors), 30)
    eventually(lambda: is_idle(driver), 30)


def test_case_25_a_stopped_worker_is_as_good_as_dead(driver: Driver) -> None:
    victims = driver.status().groups[1].pids
    crowd = Crowd(driver)
    crowd.meets(signal.SIGSTOP, victims[0])
    eventually(lambda: driver.status().groups[1].state != "ready", HEARTBEAT_TIMEOUT_MS / 1000 + 30)
    crowd.finish()
    eventually(lambda: all_ready(driver), 180)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victims), 60)


@pytest.mark.nightly  # the drill below does it too
def test_a_killed_router_takes_only_its_own_work_along(serving: Serving, driver: Driver) -> None:
    [router] = [pid for pid, command in serving.processes().items() if "ServeReplica:orcaserve:router" in command]
    routers = driver.status().num_routers
    crowd = Crowd(driver)
    crowd.meets(signal.SIGKILL, router)
    eventually(lambda: driver.status().num_routers == routers - 1, 30)
    crowd.finish()
    eventually(lambda: serving.get("/ready")[0] == 200, 60)
    assert serving.post("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"].endswith("Berlin.")
    eventually(lambda: is_idle(driver), 30)


def test_a_drill_loses_nothing(serving: Serving) -> None:
    """Two faults of each kind under load; `make drill` is the long one."""
    options = DrillOptions(
        kinds=parse_kinds("", num_nodes=0),
        num_faults=10,
        users=6,
        num_cases=4,
        prompt_tokens=(5, 60),
        output_tokens=(40, 80),
        mean_gap_s=0.2,
    )
    injector = Injector(serving.process.pid, random.Random(3))
    report = asyncio.run(Drill(serving.url, injector, options, lambda _: None).run())
    assert report.faults == dict.fromkeys(options.kinds, 2)
    assert (report.lost, report.repeated_tokens, report.missing_tokens, report.leaked_blocks) == (0, 0, 0, 0), report
    assert report.whole_again
    assert report.identical == report.accepted > 10


@pytest.mark.parametrize(
    ("num_documents", "num_rounds"), [(8, 1), pytest.param(64, 10, marks=pytest.mark.nightly)], ids=["short", "long"]
)
def test_case_40_no_answer_holds_anothers_words(driver: Driver, num_documents: int, num_rounds: int) -> None:
    """64 at a time behind one shared prefix, each with a document of its own, a quarter aborted at random moments."""
    [shared, *documents] = prompts_of(64, *[96] * num_documents)
    cases = [(shared + document, 16, 0.0) for document in documents]
    expected = [driver.run(driver.generate(*case)) for case in cases]
    chance = random.Random(40)

    async def one(number: int) -> None:
        answer = asyncio.ensure_future(driver.generate(*cases[number]))
        if chance.random() < 0.25:
            await asyncio.wait((answer,), timeout=chance.uniform(0, 2))
            answer.cancel()
            await asyncio.wait((answer,))
        if not answer.cancelled():
            assert await answer == expected[number]

    async def round_of_all() -> None:
        await asyncio.gather(*(one(i % num_documents) for i in range(64)))

    for _ in range(num_rounds):
        driver.run(round_of_all(), timeout_s=300)
    eventually(lambda: is_idle(driver), 30)


def test_case_26_a_stop_ends_streams_in_order_and_leaves_no_process(serving: Serving, driver: Driver) -> None:
    """What can finish in the grace time does, the rest is told so; nothing new gets in; no process, no file is left.

    Signalled is the whole process group, as `timeout` does it: Ray's processes would end at once.
    """
    processes = serving.processes()
    folders = {Path(word).parent for command in processes.values() for word in command.split() if "/orca-" in word}
    endless = {"model": CHAT["model"], "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    cut_off = driver.start(asyncio.to_thread(read_all, serving, endless))
    eventually(lambda: driver.status().scheduler.running == 1, 60)
    quick = driver.start(driver.generate(prompts_of(4)[0], 40))
    eventually(lambda: driver.status().scheduler.running == 2, 60)

    os.killpg(serving.process.pid, signal.SIGTERM)
    eventually(lambda: serving.get("/ready")[0] == 503, 10)
    status, headers, _ = read_all(serving, {**endless, "stream": False, "max_tokens": 1})
    assert (status, "retry-after" in headers) == (503, True)
    serving.stop(signal.SIGTERM)  # a second one, which must not hurry anything

    assert len(quick.result(60)) == 40
    status, _, body = cut_off.result(60)
    assert status == 200
    assert "event: error" in body.splitlines()[-3:]
    assert '"finish_reason":"' not in body
    assert serving.process.returncode == 0
    assert still_alive(processes) == {}
    assert [folder for folder in folders if folder.exists()] == []


def read_all(serving: Serving, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, headers, answer.read().decode()


def test_an_error_at_the_start_is_one_line(tmp_path: Path) -> None:
    failed = Serving(str(tmp_path))
    assert failed.process.wait(180) == 2
    failed.stop()
    assert failed.output.count("\n") == 1
    assert "config.json" in failed.output

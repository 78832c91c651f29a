"""A rank's shell, with the real model in its thread and a scheduler's end of the channel."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from orcaserve.cluster.channel import Server
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.model_info import read_model_info
from orcaserve.cluster.wire import Failed, Forget, FromRank, Hello, Holds, Neighbour, Step
from orcaserve.cluster.worker_actor import WorkerActor
from orcaserve.engine.messages import PoolFile, StepPlan
from orcaserve.workers import demo

UNKNOWN_SLOT = StepPlan(0, [], [], b"", b"", [], [], np.array([10_000], np.int32).tobytes())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the actor will, in what is its own process otherwise


async def started(groups: int = 1) -> WorkerActor:
    model = read_model_info(demo.pull("smollm2-135m"))
    config = ServeConfig(
        groups=groups, num_threads=1, kv_cache_memory="16MiB", max_num_seqs=4, max_num_batched_tokens=16
    )
    actor = WorkerActor(config, model, "cpu", 0)
    await actor.load("")
    await actor.allocate(16)
    await actor.warm_up()
    return actor


def test_a_worker_whose_step_failed_is_not_taken_over() -> None:
    """The other ranks of its group may be a collective ahead of it, or behind."""

    async def test() -> None:
        actor = await started()
        said: asyncio.Queue[Any] = asyncio.Queue()
        scheduler: Server[FromRank] = Server("127.0.0.1", FromRank, lambda *m: said.put_nowait(m), lambda _: None)
        try:
            async with asyncio.timeout(60):
                await actor.attach(scheduler.endpoint, Hello(0, "a", 0))
                rank, hello = await said.get()
                assert hello == Hello(0, "a", 0)
                scheduler.send(rank, Step(UNKNOWN_SLOT))
                assert isinstance((await said.get())[1], Failed)
                with pytest.raises(RuntimeError, match="a step failed here"):
                    await actor.attach(scheduler.endpoint, Hello(0, "a", 0))
        finally:
            scheduler.close()

    asyncio.run(test())


def test_a_pool_that_cannot_be_read_is_passed_over() -> None:
    """Its group has died meanwhile, or lives in a container of its own: no answer, and the rank goes on."""

    async def test() -> None:
        actor = await started(groups=2)
        said: asyncio.Queue[Any] = asyncio.Queue()
        scheduler: Server[FromRank] = Server("127.0.0.1", FromRank, lambda *m: said.put_nowait(m), lambda _: None)
        try:
            async with asyncio.timeout(60):
                await actor.attach(scheduler.endpoint, Hello(0, "a", 0, "node"))
                rank, hello = await said.get()
                assert (hello.node_id, hello.pool.num_blocks) == ("node", 16)
                scheduler.send(rank, Neighbour(1, "b", PoolFile("/proc/self/fd/999", "orcaserve-kv-0-0", 16)))
                scheduler.send(rank, Neighbour(2, "c", hello.pool))
                assert (await said.get())[1] == Holds(2, "c")
                scheduler.send(rank, Forget(2))
                scheduler.send(rank, Forget(1))
                scheduler.send(rank, Neighbour(1, "d", hello.pool))
                assert (await said.get())[1] == Holds(1, "d")
        finally:
            scheduler.close()

    asyncio.run(test())

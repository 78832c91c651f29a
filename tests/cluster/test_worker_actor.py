"""A rank's shell, with the real model in its thread and a scheduler's end of the channel."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from orcaserve.cluster.channel import Server
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.model_info import read_model_info
from orcaserve.cluster.wire import Failed, FromRank, Hello, Step
from orcaserve.cluster.worker_actor import WorkerActor
from orcaserve.engine.messages import StepPlan
from orcaserve.workers import demo

UNKNOWN_SLOT = StepPlan(0, [], [], b"", b"", [], [], np.array([10_000], np.int32).tobytes())


def test_a_worker_whose_step_failed_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of its group may be a collective ahead of it, or behind."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the actor will, in what is its own process otherwise

    async def test() -> None:
        model = read_model_info(demo.pull("smollm2-135m"))
        config = ServeConfig(num_threads=1, kv_cache_memory="16MiB", max_num_seqs=4, max_num_batched_tokens=16)
        actor = WorkerActor(config, model, "cpu", 0)
        await actor.load("")
        await actor.allocate(16)
        await actor.warm_up()
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

"""A scheduler actor whose groups compute nothing: the real service, channels and engine, ranks that only count.

It takes the place of `cluster.scheduler_actor.SchedulerActor` under the same actor name, so that the real routers of
the real Serve application find it: what is left of the cost of a token is the cost of serving.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np
import ray

from orcaserve.cluster.channel import BlockingClient, ChannelClosed, Endpoint
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.ray_address import NAMESPACE
from orcaserve.cluster.scheduler_actor import scheduler_actor_name
from orcaserve.cluster.service import SchedulerService, scheduler_config
from orcaserve.cluster.wire import ClusterStatus, Done, Hello, Leave, Step, ToRank

NUM_BLOCKS = 100_000
FIRST_WORD, NUM_WORDS = 300, 4096  # ids of whole words in the demo model's vocabulary


class NullRank:
    """Answers each plan at once (or `step_s` later) with a token for every row."""

    def pid(self) -> int:
        return os.getpid()

    def serve(self, endpoint: Endpoint, hello: Hello, step_s: float) -> None:
        """Until the scheduler lets go."""
        from orcaserve.engine.messages import StepResult

        link: BlockingClient[ToRank] = BlockingClient(endpoint, ToRank)
        words = np.resize(np.arange(FIRST_WORD, FIRST_WORD + NUM_WORDS, dtype=np.int32), 2 * NUM_WORDS)
        try:
            link.send(hello)
            due = time.perf_counter()
            while not isinstance(message := link.recv(), Leave):
                assert isinstance(message, Step), message
                plan = message.plan
                rows = sum(chunk.samples for chunk in plan.chunks) + len(plan.decode_slots) // 4
                due = max(due, time.perf_counter()) + step_s
                if step_s:
                    time.sleep(max(0.0, due - time.perf_counter()))
                start = plan.step_id % NUM_WORDS
                link.send(Done(StepResult(plan.step_id, words[start : start + rows].tobytes())))
        except ChannelClosed:
            return
        finally:
            link.close()


class NullScheduler:
    """The methods that routers and `orcaserve serve` call on the real actor."""

    def __init__(self, config: ServeConfig, model: ModelInfo, step_s: float) -> None:
        self._config = config
        self._born_s = time.monotonic()
        self._step_s = step_s
        rank: Any = ray.remote(NullRank).options(num_cpus=0, max_concurrency=2)
        self._ranks: list[Any] = [rank.remote() for _ in range(config.groups)]
        self._service = SchedulerService(
            scheduler_config(config, model),
            host=ray.util.get_node_ip_address(),
            step_timeout_s=config.step_timeout_s,
            clock=time.monotonic,
            on_group_lost=lambda group_id, reason: None,
            status=self._status,
        )

    async def open_groups(self) -> dict[str, list[int]]:
        """Connect the ranks; returns the process ids by part."""
        for group_id, rank in enumerate(self._ranks):
            complete = self._service.expect_group(group_id, "null", 1)
            rank.serve.remote(self._service.rank_endpoint, Hello(group_id, "null", 0), self._step_s)
            await complete.wait()
            self._service.open_group(group_id, NUM_BLOCKS)
        pids = await asyncio.gather(*(rank.pid.remote() for rank in self._ranks))
        return {"scheduler": [os.getpid()], "ranks": list(pids)}

    async def other_options(self, config: ServeConfig) -> list[str]:
        return [name for name, value in config if value != getattr(self._config, name)]

    async def router_endpoint(self) -> Endpoint:
        return self._service.router_endpoint

    async def status(self) -> ClusterStatus:
        return self._status()

    async def stop(self, drain_s: float) -> bool:
        finished = await self._service.drain(drain_s)
        self._service.close("the service is shutting down")
        return finished

    def _status(self) -> ClusterStatus:
        return ClusterStatus(
            ready=True,
            draining=self._service.draining,
            groups=[],
            scheduler=self._service.scheduler.stats(),
            num_routers=self._service.num_routers,
            num_dropped_messages=self._service.num_dropped,
            num_refused_connections=self._service.num_refused,
            num_group_losses=0,
            uptime_s=time.monotonic() - self._born_s,
            scheduler_pid=os.getpid(),
        )


def start_null_scheduler(config: ServeConfig, model: ModelInfo, step_s: float) -> dict[str, list[int]]:
    """Create it under the name that the routers look for; returns the process ids by part."""
    remote: Any = ray.remote(NullScheduler)
    actor = remote.options(
        name=scheduler_actor_name(config.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=1000,
    ).remote(config, model, step_s)
    return ray.get(actor.open_groups.remote(), timeout=60)

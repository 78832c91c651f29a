"""The one scheduler of an application as a Ray actor: a shell that keeps the groups alive around SchedulerService."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import ray
from ray.actor import ActorHandle

from orcaserve.cluster.channel import Endpoint
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.group import NAMESPACE, Group, GroupFailed, find_workers, stop_strangers
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.service import SchedulerService, scheduler_config
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import ClusterStatus

logger = logging.getLogger(__name__)

_STUCK_AFTER_S = 5.0  # work is out and nothing comes back: no longer ready, though not yet given up
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the n-th start in a row that fails


class SchedulerActor:
    """Born again by Ray after a crash, it adopts the workers that still live; the routers bring their requests back."""

    def __init__(self, config: ServeConfig, model: ModelInfo, device: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._config = config
        self._born_s = time.monotonic()
        self._num_group_losses = 0
        self._stopping = False
        self._groups = {i: Group(i, config, model, device) for i in range(config.groups)}
        self._lost: dict[int, asyncio.Future[str]] = {}
        self._service = SchedulerService(
            scheduler_config(config, model.max_model_len, model.eos_token_ids),
            host=ray.util.get_node_ip_address(),
            step_timeout_s=config.step_timeout_s,
            clock=time.monotonic,
            on_group_lost=self._on_group_lost,
            status=self._status,
        )
        self._main = asyncio.get_running_loop().create_task(self._run())

    async def router_endpoint(self) -> Endpoint:
        return self._service.router_endpoint

    async def status(self) -> ClusterStatus:
        return self._status()

    async def stop(self, drain_s: float) -> bool:
        """Let what runs finish for `drain_s`, then end everything. True when nothing was cut off."""
        finished = await self._service.drain(drain_s)
        self._stopping = True
        self._main.cancel()
        self._service.close("the service is shutting down")
        await asyncio.gather(*(group.stop() for group in self._groups.values()))
        return finished

    async def _run(self) -> None:
        left_behind = await asyncio.to_thread(find_workers, self._config.name)
        async with asyncio.TaskGroup() as tasks:
            for group_id, group in self._groups.items():
                tasks.create_task(self._keep(group, left_behind.pop(group_id, {})))
            for group_id, incarnations in left_behind.items():
                tasks.create_task(asyncio.to_thread(stop_strangers, self._config.name, group_id, incarnations))

    async def _keep(self, group: Group, left_behind: dict[str, dict[int, ActorHandle]]) -> None:
        """Have this group running, for as long as the application lives."""
        adopted = await self._adopt(group, left_behind)
        num_failures = 0
        while True:
            if not adopted and not await self._start(group):
                num_failures += 1
                await asyncio.sleep(_BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
                continue
            adopted = False
            num_failures = 0
            group.state = "ready"
            group.error = await self._lost[group.group_id]
            group.state = "dead"
            self._num_group_losses += 1
            await group.stop()

    async def _adopt(self, group: Group, left_behind: dict[str, dict[int, ActorHandle]]) -> bool:
        for incarnation, workers in list(left_behind.items()):
            if len(workers) != group.size:
                continue
            del left_behind[incarnation]
            complete = self._expect(group, incarnation)
            try:
                await group.adopt(incarnation, [workers[rank] for rank in range(group.size)], self._rank_endpoint())
                await self._open(group, complete)
                logger.info("group %d: adopted %d workers", group.group_id, group.size)
                break
            except GroupFailed as error:
                await self._give_up(group, str(error))
        else:
            await asyncio.to_thread(stop_strangers, self._config.name, group.group_id, left_behind)
            return False
        await asyncio.to_thread(stop_strangers, self._config.name, group.group_id, left_behind)
        return True

    async def _start(self, group: Group) -> bool:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await group.start()
                complete = self._expect(group, group.incarnation)
                await group.attach(self._rank_endpoint())
                await self._open(group, complete)
            logger.info("group %d: ready after %.1f s", group.group_id, group.load_s)
            return True
        except (GroupFailed, TimeoutError) as error:
            await self._give_up(group, str(error) or f"not ready within {self._config.start_timeout_s:g} s")
            return False

    def _expect(self, group: Group, incarnation: str) -> asyncio.Event:
        self._lost[group.group_id] = asyncio.get_running_loop().create_future()
        return self._service.expect_group(group.group_id, incarnation, group.size)

    async def _open(self, group: Group, complete: asyncio.Event) -> None:
        hello = asyncio.ensure_future(complete.wait())
        lost = self._lost[group.group_id]
        await asyncio.wait((hello, lost), return_when=asyncio.FIRST_COMPLETED)
        hello.cancel()
        if lost.done():
            raise GroupFailed(lost.result())
        self._service.open_group(group.group_id, group.num_kv_blocks)

    async def _give_up(self, group: Group, reason: str) -> None:
        logger.error("group %d: %s", group.group_id, reason)
        group.state = "dead"
        group.error = reason
        self._service.close_group(group.group_id)
        await group.stop()

    def _on_group_lost(self, group_id: int, reason: str) -> None:
        if not self._lost[group_id].done():
            self._lost[group_id].set_result(reason)

    def _rank_endpoint(self) -> Endpoint:
        return self._service.rank_endpoint

    def _status(self) -> ClusterStatus:
        service = self._service
        working = [
            g for g in self._groups.values() if g.state == "ready" and not service.is_stuck(g.group_id, _STUCK_AFTER_S)
        ]
        return ClusterStatus(
            ready=bool(working) and not service.draining,
            draining=service.draining,
            groups=[group.status() for group in self._groups.values()],
            scheduler=service.scheduler.stats(),
            num_routers=service.num_routers,
            num_dropped_messages=service.num_dropped,
            num_refused_connections=service.num_refused,
            num_group_losses=self._num_group_losses,
            uptime_s=time.monotonic() - self._born_s,
            scheduler_pid=os.getpid(),
        )


def scheduler_actor_name(application: str) -> str:
    return f"{application}-scheduler"


def ensure_scheduler(config: ServeConfig, model: ModelInfo, device: str) -> ActorHandle:
    """The application's scheduler, created if it is not there; it outlives whoever creates it."""
    return (
        ray.remote(SchedulerActor)
        .options(
            name=scheduler_actor_name(config.name),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
            num_cpus=0,
        )
        .remote(config, model, device)
    )


def connect(application: str) -> EngineStream:
    """A router replica's stream to the application's scheduler; call `start` on it."""

    async def locate() -> Endpoint:
        try:
            actor = await asyncio.to_thread(ray.get_actor, scheduler_actor_name(application), NAMESPACE)
            async with asyncio.timeout(10.0):
                return await actor.router_endpoint.remote()
        except (ValueError, ray.exceptions.RayError) as error:
            raise ConnectionError(str(error)) from error

    return EngineStream(locate)


def resolve_device(device: str) -> str:
    """ "auto" is cuda where the cluster has GPUs."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"

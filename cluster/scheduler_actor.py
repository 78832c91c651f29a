"""The one scheduler of an application as a Ray actor: a shell around SchedulerService and its Fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.autoscaling import Autoscaler, ScalingRules, load_of
from orcaserve.cluster.channel import Endpoint
from orcaserve.cluster.config import Device, ServeConfig
from orcaserve.cluster.fleet import Fleet, report_bug
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.ray_address import NAMESPACE
from orcaserve.cluster.service import SchedulerService, scheduler_config
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import ClusterStatus

logger = logging.getLogger(__name__)

_SCALING_PERIOD_S = 1.0
_ANSWER_TIMEOUT_S = 60.0
_DESERTED_POLL_S = 1.0
NODE_RESOURCE = "scheduler"
_ROUTER_OPTIONS = {*AppConfig.model_fields, "served_model_name", "host", "port", "routers", "ray_address"} - {
    "tenants_file"
}
_STUCK_AFTER_S = 4.0  # work is out and nothing comes back: no longer ready, though not yet given up


class SchedulerActor:
    """Born again by Ray after a crash, it adopts the workers that still live; the routers bring their requests back."""

    def __init__(self, config: ServeConfig, model: ModelInfo, device: Device) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_end_on_bug)
        self._born_s = time.monotonic()
        self._fleet = Fleet(config, model, device)
        self._service = SchedulerService(
            scheduler_config(config, model),
            host=ray.util.get_node_ip_address(),
            step_timeout_s=config.step_timeout_s,
            clock=time.monotonic,
            on_group_lost=self._fleet.on_group_lost,
            status=self._status,
        )
        self._config = config
        self._begun = loop.create_task(self._fleet.begin(self._service))
        self._scaling = loop.create_task(self._scale()) if len(set(config.group_range)) > 1 else None
        self._watch = loop.create_task(self._end_when_deserted())
        for task in self._own_tasks:
            task.add_done_callback(report_bug)

    @property
    def _own_tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in (self._begun, self._scaling, self._watch) if task is not None]

    async def router_endpoint(self) -> Endpoint:
        return self._service.router_endpoint

    async def status(self) -> ClusterStatus:
        return self._status()

    async def other_options(self, config: ServeConfig) -> list[str]:
        """Options whose values here are not those; what only the routers go by does not count."""
        names = [name for name in ServeConfig.model_fields if name not in _ROUTER_OPTIONS]
        return [name for name in names if getattr(config, name) != getattr(self._config, name)]

    async def resize(self, num_groups: int) -> None:
        """Have this many groups; those that are too many finish what they run first."""
        await self._begun
        await self._fleet.resize(num_groups)

    async def leave_node(self, node_id: str, drain_s: float) -> int:
        """A node goes: its groups are replaced elsewhere, its routers get ready for the end. May be said again.

        Returns how many groups and open choices are there still.
        """
        await self._begun
        self._service.leave_node(node_id)
        return self._fleet.leave_node(node_id, drain_s) + self._service.num_open_on(node_id)

    async def stop(self, drain_s: float) -> bool:
        """Let what runs finish for `drain_s`, then end everything. True when nothing was cut off."""
        finished = await self._service.drain(drain_s)
        for task in self._own_tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._service.close("the service is shutting down")
        await self._fleet.stop()
        return finished

    async def _scale(self) -> None:
        """Follow the load, between --min-groups and --max-groups."""
        await self._begun
        autoscaler = Autoscaler(scaling_rules(self._config))
        while True:
            await asyncio.sleep(_SCALING_PERIOD_S)
            stats, fleet = self._service.scheduler.stats(), self._fleet
            wanted = autoscaler.decide(load_of(stats, time.monotonic(), fleet.num_wanted, self._config.max_num_seqs))
            if wanted != fleet.num_wanted:
                logger.info("scaling from %d to %d groups: %s", fleet.num_wanted, wanted, autoscaler.reason)
                change = f"from {fleet.num_wanted} to {wanted} groups: {autoscaler.reason}"
                self._service.observer.note("scaling", change)
                await fleet.resize(wanted)

    async def _end_when_deserted(self) -> None:
        """Once the application is deleted nobody else ends this actor and its groups, which outlive their makers."""
        config = self._config
        had_routers, alone_since_s = False, time.monotonic()
        while True:
            await asyncio.sleep(_DESERTED_POLL_S)
            now_s = time.monotonic()
            if self._service.num_routers:
                had_routers, alone_since_s = True, now_s
            elif now_s - alone_since_s > (config.orphan_timeout_s if had_routers else config.start_timeout_s):
                if not await asyncio.to_thread(_application_exists, config.name):
                    break
                alone_since_s = now_s
        logger.warning("no router and no application %s any more: ending", config.name)
        await self.stop(drain_s=0.0)
        ray.kill(ray.get_actor(scheduler_actor_name(config.name), NAMESPACE))

    def _status(self) -> ClusterStatus:
        service, groups = self._service, self._fleet.groups.values()
        working = [g for g in groups if g.state == "ready" and not service.is_stuck(g.group_id, _STUCK_AFTER_S)]
        return ClusterStatus(
            ready=(bool(working) or self._sleeps()) and not service.draining,
            draining=service.draining,
            groups=[group.status() for group in groups],
            scheduler=service.scheduler.stats(),
            num_routers=service.num_routers,
            num_dropped_messages=service.num_dropped,
            num_refused_connections=service.num_refused,
            num_group_losses=self._fleet.num_losses,
            uptime_s=time.monotonic() - self._born_s,
            scheduler_pid=os.getpid(),
        )

    def _sleeps(self) -> bool:
        """Scaled to nothing, or just waking up: a request would be held, and served after the start of a group."""
        return self._config.group_range[0] == 0 and all(
            group.state == "starting" for group in self._fleet.groups.values()
        )


def scaling_rules(config: ServeConfig) -> ScalingRules:
    low, high = config.group_range
    return ScalingRules(
        min_groups=low,
        max_groups=high,
        ttft_target_s=config.ttft_target_s,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        to_zero_delay_s=config.downscale_to_zero_delay_s,
    )


def _end_on_bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback that raises has left the scheduler in doubt: a new one, told everything by the routers, is not."""
    loop.default_exception_handler(context)
    if "handle" in context:
        logger.critical("ending this scheduler, so that Ray starts another")
        os._exit(1)


def _application_exists(name: str) -> bool:
    """True also when nobody can tell."""
    from ray import serve
    from ray.serve import context

    context._disconnect()  # the controller that was found before may be gone for good, and another be there
    try:
        return name in serve.status().applications
    except ray.exceptions.RayError as error:
        logger.warning("Ray Serve does not tell whether application %s is there: %s", name, error)
        return True


def scheduler_actor_name(application: str) -> str:
    return f"{application}-scheduler"


class OtherOptions(ValueError):
    """The application's scheduler runs already, and not as it is wanted now; the message is for the operator."""


def ensure_scheduler(config: ServeConfig, model: ModelInfo, device: Device) -> ActorHandle:
    """The application's scheduler, created if it is not there; it outlives whoever creates it.

    Raises OtherOptions, so that an update in place with another model fails, and does not answer with the old one.
    """
    name = scheduler_actor_name(config.name)
    try:
        found: Any = ray.get_actor(name, NAMESPACE)
    except ValueError:
        return _create_scheduler(name, config, model, device)
    if other := ray.get(found.other_options.remote(config), timeout=_ANSWER_TIMEOUT_S):
        raise OtherOptions(
            f"application {config.name} runs with other values of {', '.join(other)}: delete it first, "
            "serve under another name, or roll out to another cluster"
        )
    return found


def _create_scheduler(name: str, config: ServeConfig, model: ModelInfo, device: Device) -> ActorHandle:
    """Where nodes are set aside for it by a resource of that name, it sits on one of them."""
    place = {NODE_RESOURCE: 0.001} if NODE_RESOURCE in ray.cluster_resources() else {}
    actor: Any = ray.remote(SchedulerActor)
    return actor.options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=1000,
        num_cpus=0,
        resources=place,
    ).remote(config, model, device)


def connect(application: str) -> EngineStream:
    """A router replica's stream to the application's scheduler; call `start` on it."""

    async def locate() -> Endpoint:
        try:
            actor = await asyncio.to_thread(ray.get_actor, scheduler_actor_name(application), NAMESPACE)
            async with asyncio.timeout(10.0):
                return await actor.router_endpoint.remote()
        except (ValueError, ray.exceptions.RayError) as error:
            raise ConnectionError(str(error)) from error

    return EngineStream(locate, ray.get_runtime_context().get_node_id())


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Device:
    """auto is cuda where the cluster has GPUs."""
    if device == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    return device

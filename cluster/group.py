"""One tensor-parallel group on the cluster: a placement group and a worker actor per rank.

The actors are detached and named after the group and its incarnation, so that a scheduler that comes back after a
crash finds those that still live and takes them over with their weights loaded.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orcaserve.cluster.channel import Endpoint
from orcaserve.cluster.config import Device, ServeConfig
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.ray_address import NAMESPACE
from orcaserve.cluster.wire import GroupState, GroupStatus, Hello
from orcaserve.cluster.worker_actor import WorkerActor

logger = logging.getLogger(__name__)

_ADOPT_TIMEOUT_S = 10.0
_PROCESS_START_TIMEOUT_S = 120.0
_WATCH_PERIOD_S = 1.0


class GroupFailed(Exception):
    """The group could not be started or adopted; the message is for the operator."""


class Group:
    """States: starting -> ready -> draining -> dead; `start` begins again with new processes."""

    def __init__(self, group_id: int, config: ServeConfig, model: ModelInfo, device: Device) -> None:
        self.group_id = group_id
        self.state: GroupState = "starting"
        self.phase = ""
        self.incarnation = ""
        self.num_kv_blocks = 0
        self.num_starts = 0
        self.error = ""
        self.load_s = 0.0
        self._config = config
        self._model = model
        self._device = device
        self._placement: PlacementGroup | None = None
        self._workers: list[ActorHandle] = []
        self._creating: asyncio.Future[None] | None = None
        self._whereabouts: list[tuple[str, int]] = []

    @property
    def size(self) -> int:
        return self._config.tensor_parallel_size

    def status(self) -> GroupStatus:
        return GroupStatus(
            group_id=self.group_id,
            state=self.state,
            phase=self.phase,
            num_kv_blocks=self.num_kv_blocks,
            num_starts=self.num_starts,
            node_ids=[node for node, _ in self._whereabouts],
            pids=[pid for _, pid in self._whereabouts],
            error=self.error,
            load_s=self.load_s,
        )

    async def start(self) -> None:
        """Place, load, allocate and warm up new workers. Raises GroupFailed."""
        self.state = "starting"
        self.num_starts += 1
        self.incarnation = uuid.uuid4().hex[:8]
        started_s = asyncio.get_running_loop().time()
        try:
            await self._place()
            await self.while_they_answer(self._load())
        except RayError as error:
            raise GroupFailed(_reason(error)) from error
        self.load_s = asyncio.get_running_loop().time() - started_s

    async def adopt(self, incarnation: str, workers: list[ActorHandle], endpoint: Endpoint) -> None:
        """Take over workers that a former scheduler has left. Raises GroupFailed when they are not all well."""
        self.incarnation = incarnation
        self._workers = workers
        self._placement = await asyncio.to_thread(_find_placement, self._name(incarnation))
        self.phase = "adopting"
        try:
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                self._whereabouts = await self._ask_whereabouts()
                await self.attach(endpoint)
        except (RayError, TimeoutError) as error:
            raise GroupFailed(f"could not adopt: {_reason(error)}") from error
        self.phase = ""
        self.num_starts = max(self.num_starts, 1)

    async def attach(self, endpoint: Endpoint) -> None:
        """Tell every rank where its steps come from. Raises GroupFailed."""
        try:
            blocks: list[int] = await asyncio.gather(
                *(
                    worker.attach.remote(endpoint, Hello(self.group_id, self.incarnation, rank, node))
                    for rank, (worker, (node, _)) in enumerate(zip(self._workers, self._whereabouts, strict=True))
                )
            )
        except RayError as error:
            raise GroupFailed(_reason(error)) from error
        self.num_kv_blocks = blocks[0]
        assert set(blocks) == {self.num_kv_blocks}, blocks

    async def while_they_answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Loading may take long; a worker that is stopped, or cut off, is noticed all the same. Raises GroupFailed."""
        working = asyncio.ensure_future(work)
        silence = asyncio.ensure_future(self._silence())
        try:
            await asyncio.wait((working, silence), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise GroupFailed(silence.result())
            working.result()
        finally:
            working.cancel()
            silence.cancel()

    async def stop(self) -> None:
        """End every process of the group and give its place and memory back; never fails."""
        self.num_kv_blocks = 0
        if self._creating is not None:
            await asyncio.wait((self._creating,))
            self._creating.exception()  # whoever waited for it knows
        workers, self._workers = self._workers, []
        placement, self._placement = self._placement, None
        self._whereabouts = []
        await asyncio.to_thread(_remove, workers, placement)

    async def _place(self) -> None:
        self.phase = "placing"
        await self._create(self._create_placement)
        assert self._placement is not None
        await self._placement.ready()
        self.phase = "starting workers"
        await self._create(self._create_workers)
        try:
            async with asyncio.timeout(_PROCESS_START_TIMEOUT_S):
                self._whereabouts = await self._ask_whereabouts()
        except TimeoutError:
            raise GroupFailed(f"its processes were not there within {_PROCESS_START_TIMEOUT_S:g} s") from None

    async def _create(self, create: Callable[[], None]) -> None:
        """In a thread: Ray's store may be away. When this is cancelled the thread goes on, and `stop` waits for it."""
        self._creating = asyncio.ensure_future(asyncio.to_thread(create))
        await asyncio.shield(self._creating)

    def _create_placement(self) -> None:
        bundles = [self._bundle()] * self.size
        name = self._name(self.incarnation)
        self._placement = placement_group(bundles, strategy="STRICT_PACK", name=name, lifetime="detached")

    def _create_workers(self) -> None:
        assert self._placement is not None
        actor: Any = ray.remote(WorkerActor)
        for rank in range(self.size):
            options = actor.options(
                name=f"{self._name(self.incarnation)}-{rank}",
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                num_gpus=self._gpus_per_rank() if self._device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, rank),
            )
            self._workers.append(options.remote(self._config, self._model, self._device, rank))

    async def _ask_whereabouts(self) -> list[tuple[str, int]]:
        return await asyncio.gather(*(w.whereabouts.remote() for w in self._workers))

    async def _silence(self) -> str:
        """Waits until a worker is dead or says nothing; returns which of them."""
        limit_s = self._config.step_timeout_s
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    await self._ask_whereabouts()
            except RayError as error:
                return _reason(error)
            except TimeoutError:
                return f"a worker did not answer for {limit_s:g} s while it was {self.phase or 'attached'}"
            await asyncio.sleep(_WATCH_PERIOD_S)

    async def _load(self) -> None:
        self.phase = "fetching the model"
        await self._workers[0].find_model.remote()
        self.phase = "loading weights"
        init_method = await self._workers[0].rendezvous.remote()
        blocks = await asyncio.gather(*(w.load.remote(init_method) for w in self._workers))
        self.phase = "allocating the KV cache"
        await asyncio.gather(*(w.allocate.remote(min(blocks)) for w in self._workers))
        self.phase = "warming up"
        await asyncio.gather(*(w.warm_up.remote() for w in self._workers))
        self.phase = ""

    def _gpus_per_rank(self) -> float:
        return (self._config.gpus_per_group or self.size) / self.size

    def _bundle(self) -> dict[str, float]:
        if self._device == "cpu" and not self._config.gpus_per_group:
            bundle: dict[str, float] = {"CPU": 1}
        else:
            bundle = {"GPU": self._gpus_per_rank()}
        if self._config.accelerator_type:
            bundle[f"accelerator_type:{self._config.accelerator_type}"] = 0.001
        return bundle

    def _name(self, incarnation: str) -> str:
        return f"{self._config.name}-group-{self.group_id}-{incarnation}"


def find_workers(name: str) -> dict[int, dict[str, dict[int, ActorHandle]]]:
    """Living worker actors of an application: by group, incarnation and rank. Blocks for calls to Ray.

    An incarnation whose scheduler died before it had any workers is there too: it has a placement group.
    """
    found: dict[int, dict[str, dict[int, ActorHandle]]] = defaultdict(lambda: defaultdict(dict))
    prefix = f"{name}-group-"
    for placed in placement_group_table().values():
        if placed["state"] != "REMOVED" and placed["name"].startswith(prefix):
            group_id, incarnation = placed["name"].removeprefix(prefix).split("-")
            found[int(group_id)][incarnation] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] != NAMESPACE or not entry["name"].startswith(prefix):
            continue
        group_id, incarnation, rank = entry["name"].removeprefix(prefix).split("-")
        try:
            found[int(group_id)][incarnation][int(rank)] = ray.get_actor(entry["name"], NAMESPACE)
        except ValueError:
            logger.info("%s died while it was looked for", entry["name"])
    return found


def stop_strangers(name: str, group_id: int, incarnations: dict[str, dict[int, ActorHandle]]) -> None:
    """End workers that no scheduler will take over."""
    for incarnation, workers in incarnations.items():
        _remove(list(workers.values()), _find_placement(f"{name}-group-{group_id}-{incarnation}"))


def _find_placement(name: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def _remove(workers: list[ActorHandle], placement: PlacementGroup | None) -> None:
    for worker in workers:
        ray.kill(worker)
    if placement is not None:
        remove_placement_group(placement)


def _reason(error: BaseException) -> str:
    """What the operator wants to read: the worker's own error, not Ray's wrapping of it."""
    if isinstance(error, RayTaskError):
        cause: Any = error.cause
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        return "a worker process died while it was starting"
    return str(error) or type(error).__name__

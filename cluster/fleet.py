"""The groups of an application: as many as wanted, each started, watched, started again, drained and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import internal_kv

from orcaserve.cluster.config import Device, ServeConfig
from orcaserve.cluster.group import Group, GroupFailed, find_workers, stop_strangers
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.service import SchedulerService

logger = logging.getLogger(__name__)

Survivors = dict[str, dict[int, ActorHandle]]  # of one group: by incarnation and rank

_HELLO_TIMEOUT_S = 10.0
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the n-th start in a row that fails
_DRAIN_POLL_S = 0.1


class Fleet:
    """Works for the service: opens groups on it when they are ready, and is told by it when one is lost."""

    def __init__(self, config: ServeConfig, model: ModelInfo, device: Device) -> None:
        self.groups: dict[int, Group] = {}
        self.num_losses = 0
        self._config = config
        self._model = model
        self._device = device
        self._lost: dict[int, asyncio.Future[str]] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._retirements: set[asyncio.Task[None]] = set()

    async def begin(self, service: SchedulerService) -> None:
        """Take over what a former scheduler has left, and start what is missing."""
        self._service = service
        survivors = await asyncio.to_thread(find_workers, self._config.name)
        whole = {
            group_id
            for group_id, incarnations in survivors.items()
            if any(len(workers) == self._config.tensor_parallel_size for workers in incarnations.values())
        }
        size = await asyncio.to_thread(_remembered_size)
        num_groups = max(self._config.groups, len(whole)) if size is None else size
        free = (group_id for group_id in range(len(whole) + num_groups) if group_id not in whole)
        for group_id in [*sorted(whole), *free][:num_groups]:
            self._add(group_id, survivors.pop(group_id, {}))
        for group_id, remains in survivors.items():
            await asyncio.to_thread(stop_strangers, self._config.name, group_id, remains)

    @property
    def num_wanted(self) -> int:
        return sum(group.state != "draining" for group in self.groups.values())

    async def resize(self, num_groups: int) -> None:
        """Start new groups, or drain some: first those that are not ready yet."""
        try:
            await asyncio.to_thread(_remember_size, num_groups)
        except RayError as error:
            logger.warning("a scheduler after this one would not have %d groups: %s", num_groups, error)
        staying = [group for group in self.groups.values() if group.state != "draining"]
        for group_id in range(len(self.groups) + num_groups):
            if len(staying) >= num_groups:
                break
            if group_id not in self.groups:
                staying.append(self._add(group_id, {}))
        staying.sort(key=lambda group: (group.state == "ready", -group.group_id))
        for group in staying[: len(staying) - num_groups]:
            self._retire_soon(group, self._config.drain_timeout_s)

    def leave_node(self, node_id: str, drain_s: float) -> int:
        """Replace the groups that have a rank on this node; returns how many of them are still there."""
        here = [group for group in self.groups.values() if node_id in group.status().node_ids]
        for group in here:
            if group.state != "draining":
                self._add(next(i for i in range(len(self.groups) + 1) if i not in self.groups), {})
                self._retire_soon(group, drain_s)
        return len(here)

    def on_group_lost(self, group_id: int, reason: str) -> None:
        if not self._lost[group_id].done():
            self._lost[group_id].set_result(reason)

    async def stop(self) -> None:
        for task in [*self._keepers.values(), *self._retirements]:
            task.cancel()
        await asyncio.gather(*(group.stop() for group in self.groups.values()))
        with contextlib.suppress(RayError):
            await asyncio.to_thread(_forget_size)

    def _add(self, group_id: int, survivors: Survivors) -> Group:
        group = self.groups[group_id] = Group(group_id, self._config, self._model, self._device)
        keeper = self._keepers[group_id] = asyncio.get_running_loop().create_task(self._keep(group, survivors))
        keeper.add_done_callback(report_bug)
        return group

    async def _keep(self, group: Group, survivors: Survivors) -> None:
        """Have this group running, until it is retired."""
        ready = await self._adopt(group, survivors)
        num_failures = 0
        while True:
            if not ready and not await self._start(group):
                num_failures += 1
                await asyncio.sleep(_BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
                continue
            ready, num_failures = False, 0
            group.state = "ready"
            group.error = await self._lost[group.group_id]
            self.num_losses += 1
            if group.state == "draining":
                return  # its retirement ends what is left of it
            group.state = "dead"
            await group.stop()

    def _retire_soon(self, group: Group, drain_s: float) -> None:
        was_ready = group.state == "ready"
        group.state = "draining"
        if not was_ready:
            self._keepers[group.group_id].cancel()  # now: it would start it again
        retirement = asyncio.get_running_loop().create_task(self._retire(group, was_ready, drain_s))
        self._retirements.add(retirement)
        retirement.add_done_callback(self._retirements.discard)
        retirement.add_done_callback(report_bug)

    async def _retire(self, group: Group, was_ready: bool, drain_s: float) -> None:
        """Let what it runs finish for a while; the rest moves to other groups."""
        self._service.observer.note("group draining", f"group {group.group_id}")
        if was_ready:
            self._service.drain_group(group.group_id)
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + drain_s
            while self._service.num_running(group.group_id) and loop.time() < deadline_s:
                await asyncio.sleep(_DRAIN_POLL_S)
        self._keepers.pop(group.group_id).cancel()
        self._service.close_group(group.group_id)
        await group.stop()
        del self.groups[group.group_id]

    async def _adopt(self, group: Group, survivors: Survivors) -> bool:
        """True when a whole incarnation lives and goes on; all else that was found is ended."""
        rest = dict(survivors)
        adopted = False
        for incarnation, workers in survivors.items():
            if len(workers) == group.size and not adopted:
                del rest[incarnation]
                complete = self._expect(group, incarnation)
                try:
                    await group.adopt(incarnation, [workers[r] for r in range(group.size)], self._service.rank_endpoint)
                    await self._open(group, complete)
                    logger.info("group %d: adopted its %d workers", group.group_id, group.size)
                    adopted = True
                except GroupFailed as error:
                    await self._give_up(group, str(error))
        await asyncio.to_thread(stop_strangers, self._config.name, group.group_id, rest)
        return adopted

    async def _start(self, group: Group) -> bool:
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await group.start()
                complete = self._expect(group, group.incarnation)
                await group.while_they_answer(group.attach(self._service.rank_endpoint))
                await self._open(group, complete)
        except GroupFailed as error:
            await self._give_up(group, str(error))
        except TimeoutError:
            await self._give_up(group, f"not ready within {limit_s:g} s ({group.phase})")
        else:
            logger.info("group %d: ready after %.1f s", group.group_id, group.load_s)
            return True
        return False

    def _expect(self, group: Group, incarnation: str) -> asyncio.Event:
        self._lost[group.group_id] = asyncio.get_running_loop().create_future()
        return self._service.expect_group(group.group_id, incarnation, group.size)

    async def _open(self, group: Group, complete: asyncio.Event) -> None:
        """Wait for all ranks to call in, then give the group work."""
        hello = asyncio.ensure_future(complete.wait())
        lost = self._lost[group.group_id]
        await asyncio.wait((hello, lost), timeout=_HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not hello.done() or lost.done():
            hello.cancel()
            raise GroupFailed(lost.result() if lost.done() else f"not all ranks called in within {_HELLO_TIMEOUT_S} s")
        self._service.open_group(group.group_id, group.num_kv_blocks)

    async def _give_up(self, group: Group, reason: str) -> None:
        logger.error("group %d: %s", group.group_id, reason)
        self._service.observer.note("group failed", f"group {group.group_id}: {reason}")
        group.state = "dead"
        group.error = reason
        self._service.close_group(group.group_id)
        await group.stop()


def _size_key() -> str:
    """The actor's id: another application's scheduler, or this one's after it was ended, begins with --groups."""
    return f"{ray.get_runtime_context().get_actor_id()}-groups"


def _remember_size(num_groups: int) -> None:
    """Where a scheduler finds it that Ray starts again: in Ray's own store, which outlives every actor."""
    internal_kv._internal_kv_put(_size_key(), str(num_groups), overwrite=True)


def _remembered_size() -> int | None:
    size: bytes | None = internal_kv._internal_kv_get(_size_key())
    return None if size is None else int(size)


def _forget_size() -> None:
    internal_kv._internal_kv_del(_size_key())


def report_bug(task: asyncio.Task[None]) -> None:
    """Raise what a task did not expect to happen, so that the loop's exception handler sees it."""
    if not task.cancelled():
        task.result()

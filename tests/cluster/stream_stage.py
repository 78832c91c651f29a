"""A scheduler's service, its groups and routers' streams over real channels; the ranks are CountingRanks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from orcaserve.cluster.channel import Endpoint
from orcaserve.cluster.service import SchedulerService
from orcaserve.cluster.stream import Deltas, EngineStream
from orcaserve.cluster.wire import ClusterStatus
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import SamplingParams
from tests.conftest import CountingRank

CONFIG = SchedulerConfig(max_model_len=2048, eos_token_ids=())


def request(name: str, prompt: list[int], max_tokens: int = 20, **fields: object) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=1), **fields)  # type: ignore[arg-type]


class Stage:
    """A scheduler that can be replaced, its groups, and streams that find whichever is there."""

    service_type = SchedulerService

    def __init__(self, make_rank: Callable[..., CountingRank], config: SchedulerConfig = CONFIG) -> None:
        self.make_rank = make_rank
        self.config = config
        self.lost: list[tuple[int, str]] = []
        self.streams: list[EngineStream] = []
        self.step_timeout_s = 60.0
        self.service = self._new_service()

    def _new_service(self) -> SchedulerService:
        return self.service_type(
            self.config,
            "127.0.0.1",
            self.step_timeout_s,
            time.monotonic,
            on_group_lost=lambda group_id, reason: self.lost.append((group_id, reason)),
            status=self._status,
        )

    def _status(self) -> ClusterStatus:
        stats = self.service.scheduler.stats()
        return ClusterStatus(True, False, [], stats, self.service.num_routers, 0, 0, 0, 0.0, 0)

    async def group(
        self, group_id: int = 0, incarnation: str = "a", size: int = 1, blocks: int = 512, held: bool = False
    ) -> list[CountingRank]:
        complete = self.service.expect_group(group_id, incarnation, size)
        ranks = [self.make_rank(self.service.rank_endpoint, group_id, incarnation, r) for r in range(size)]
        await asyncio.wait_for(complete.wait(), 30)
        if held:
            for rank in ranks:
                rank.gate.clear()
        self.service.open_group(group_id, blocks)
        return ranks

    async def locate(self) -> Endpoint:
        return self.service.router_endpoint

    async def stream(self) -> EngineStream:
        stream = EngineStream(self.locate)
        await asyncio.wait_for(stream.start(), 30)
        self.streams.append(stream)
        return stream

    def restart(self) -> None:
        """As after a crash: nothing is said, the sockets are gone, and a new one knows nothing."""
        self.service.vanish()
        self.service = self._new_service()


@asynccontextmanager
async def stage(make_rank: Callable[..., CountingRank], config: SchedulerConfig = CONFIG) -> AsyncIterator[Stage]:
    one = Stage(make_rank, config)
    try:
        yield one
    finally:
        for stream in one.streams:
            await stream.close()
        one.service.close("the test is over")


async def eventually(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.01)


async def tokens_of(deltas: Deltas, num_choices: int = 1) -> list[list[int]]:
    """All ids by choice, checking that each choice ends once and that nothing follows."""
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    ended: set[int] = set()
    async for delta in deltas:
        assert delta.choice_index not in ended
        ids[delta.choice_index].extend(delta.token_ids)
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length", delta
            ended.add(delta.choice_index)
    assert len(ended) == num_choices
    return ids


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())

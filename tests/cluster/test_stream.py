"""Router streams and the scheduler's service over real channels; the model is a sum, the ranks are threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from orcaserve.cluster.channel import BlockingClient, Client, Endpoint
from orcaserve.cluster.service import SchedulerService
from orcaserve.cluster.stream import Deltas, EngineStream
from orcaserve.cluster.wire import Accepted, ClusterStatus, Open, Submit, ToRouter, Welcome
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.errors import ContextLengthExceeded, QueueFull, RequestRefused, Unavailable
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import SamplingParams
from tests.conftest import CountingRank, counted_tokens

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


def test_many_requests_share_one_stream(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group(size=2)
            stream = await here.stream()
            prompts = [list(range(1, 2 + n)) for n in range(64)]
            deltas = [await stream.submit(request(f"r{i}", p)) for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*(tokens_of(d) for d in deltas))
            assert answers == [[counted_tokens(p, 20)] for p in prompts]
            assert stream.num_held == 0
            status = await stream.status()
            assert (status.scheduler.running, status.scheduler.waiting) == (0, 0)

    run(test)


def test_each_choice_has_its_own_tokens(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            deltas = await stream.submit(request("n", [5, 6, 7], n=3))
            assert await tokens_of(deltas, 3) == [counted_tokens([5, 6, 7], 20, choice) for choice in range(3)]

    run(test)


def test_refusals_keep_their_type_and_numbers(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks, msgspec.structs.replace(CONFIG, max_queued_requests=1)) as here:
            stream = await here.stream()
            with pytest.raises(RequestRefused) as refusal:
                await stream.submit(request("long", [1] * 3000))
            assert refusal.value.code == ContextLengthExceeded.code
            assert "3020" in refusal.value.message
            assert "2048" in refusal.value.message
            first = await stream.submit(request("first", [1]))
            with pytest.raises(QueueFull) as full:
                await stream.submit(request("second", [1]))
            assert full.value.retry_after_s > 0
            await first.aclose()
            second = await stream.submit(request("second", [1]))  # its place is free again
            await second.aclose()

    run(test)


def test_closing_aborts_and_frees_at_once(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            deltas = [await stream.submit(request(f"r{i}", [i + 1], 2000)) for i in range(100)]
            for each in deltas[:50]:
                await anext(each)
            for each in deltas:
                await each.aclose()
            stats = here.service.scheduler.stats
            await eventually(lambda: (stats().running, stats().waiting, stats().groups[0].used_blocks) == (0, 0, 0))
            assert stream.num_held == 0

    run(test)


def test_one_choice_is_aborted_and_the_others_go_on(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            deltas = await stream.submit(request("n", [5, 6, 7], 1900, n=3))
            deltas.abort(1)
            stats = here.service.scheduler.stats
            await eventually(lambda: stats().running + stats().waiting == 2)
            here.restart()  # the two that are left are said again under names of their own
            await here.group(incarnation="b")
            await eventually(lambda: stream.num_held == 1 and here.service.scheduler.stats().running == 2)
            deltas.abort(2)
            await eventually(lambda: here.service.scheduler.stats().running == 1)
            ids: list[int] = []
            async for delta in deltas:
                if delta.choice_index == 0:
                    ids.extend(delta.token_ids)
            assert ids == counted_tokens([5, 6, 7], 1900, 0)
            assert stream.num_held == 0

    run(test)


def test_cancelling_a_submission_aborts_it(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            for i in range(200):
                task = asyncio.create_task(stream.submit(request(f"r{i}", [1], 2000)))
                for _ in range(i % 7):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).aclose()
            stats = here.service.scheduler.stats
            await eventually(lambda: (stats().running, stats().waiting) == (0, 0))

    run(test)


def test_a_router_that_vanishes_frees_its_work(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            [rank] = await here.group(held=True)
            stream = await here.stream()
            mine = await stream.submit(request("mine", [3], 300))
            other: Client[ToRouter] = Client(here.service.router_endpoint, ToRouter, lambda _: None, lambda: None)
            other.send(Open())
            for i in range(20):
                other.send(Submit(request(f"theirs{i}", [i + 1], 2000), resumed=False))
            stats = here.service.scheduler.stats
            await eventually(lambda: stats().running + stats().waiting == 21)
            rank.gate.set()
            await eventually(lambda: stats().running >= 20)
            other.close(linger_ms=0)
            assert await tokens_of(mine) == [counted_tokens([3], 300)]
            await eventually(lambda: (stats().running, stats().waiting, here.service.num_routers) == (0, 0, 1))

    run(test)


def test_streams_survive_the_scheduler(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            prompts = [[i + 1, 2] for i in range(8)]
            deltas = [await stream.submit(request(f"r{i}", p, 200, n=1 + i % 2)) for i, p in enumerate(prompts)]
            answers = [asyncio.create_task(tokens_of(d, 1 + i % 2)) for i, d in enumerate(deltas)]
            for incarnation in ("b", "c"):
                await eventually(lambda: here.service.scheduler.stats().generation_tokens > 100)
                here.restart()
                await here.group(incarnation=incarnation)
            for i, prompt in enumerate(prompts):
                assert await answers[i] == [counted_tokens(prompt, 200, c) for c in range(1 + i % 2)]
            assert stream.num_held == 0

    run(test)


def test_streams_are_said_again_shortest_first(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group(held=True)
            stream = await here.stream()
            under_way = [await stream.submit(request(f"r{n}", [1] * n, 1900)) for n in (30, 10, 40, 20)]
            here.restart()
            await eventually(lambda: here.service.scheduler.num_waiting == 4)
            [rank] = await here.group(incarnation="b")
            await eventually(lambda: here.service.scheduler.num_waiting == 0 and rank.num_steps > 0)
            said = [new.num_prompt_tokens for plan in rank.plans for new in plan.new_slots]
            assert said == [10, 20, 30, 40]
            assert stream.num_held == len(under_way)

    run(test)


def test_no_error_on_the_way_to_the_scheduler_is_the_end_of_the_way(
    counting_ranks: Callable[..., CountingRank],
) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            good = here.service.router_endpoint
            no_address = msgspec.structs.replace(good, address="no address")  # ZeroMQ's own error
            answers: list[Endpoint | Exception] = [no_address, RuntimeError("a bug"), OSError("out of descriptors")]

            async def locate() -> Endpoint:
                answer = answers.pop(0) if answers else good
                if isinstance(answer, Exception):
                    raise answer
                return answer

            stream = EngineStream(locate)
            here.streams.append(stream)
            await asyncio.wait_for(stream.start(), 30)
            assert not answers
            deltas = await stream.submit(request("r", [1, 2], 300))
            answers.append(no_address)
            here.restart()
            good = here.service.router_endpoint
            await here.group(incarnation="b")
            assert await tokens_of(deltas) == [counted_tokens([1, 2], 300)]
            assert not answers

    run(test)


def test_nothing_is_done_for_a_router_that_has_not_opened_its_line(
    counting_ranks: Callable[..., CountingRank],
) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            bugs: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
            heard: list[object] = []
            client: Client[ToRouter] = Client(here.service.router_endpoint, ToRouter, heard.append, lambda: None)
            client.send(Submit(request("early", [1]), resumed=False))
            client.send(Open())
            client.send(Submit(request("late", [1]), resumed=False))
            await eventually(lambda: len(heard) == 2)
            client.close()
            assert [type(message) for message in heard] == [Welcome, Accepted]
            assert here.service.scheduler.stats().waiting == 1
            assert not bugs

    run(test)


class FragileService(SchedulerService):
    """A scheduler with a bug: one prompt is the end of it."""

    POISON = 666

    def _submit(self, peer: bytes, message: Submit) -> None:
        if message.request.prompt_token_ids[0] != self.POISON:
            super()._submit(peer, message)
        else:
            self._loop.call_soon(self.vanish)
            self._on_group_lost(-1, "a bug")


def test_a_request_that_kills_schedulers_is_given_up_and_the_others_live(
    counting_ranks: Callable[..., CountingRank],
) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            here.service_type = FragileService
            here.restart()
            await here.group()
            stream = await here.stream()
            prompts = [[i + 1, 3] for i in range(12)]
            answers = [
                asyncio.create_task(tokens_of(await stream.submit(request(f"r{i}", p, 1500))))
                for i, p in enumerate(prompts)
            ]
            poison = asyncio.create_task(stream.submit(request("poison", [FragileService.POISON], 2000)))

            async def restart_each_time() -> None:
                num_restarts = 0
                while True:
                    await asyncio.sleep(0.01)
                    if len(here.lost) > num_restarts:
                        num_restarts += 1
                        here.restart()
                        await here.group(incarnation=str(num_restarts))

            restarts = asyncio.create_task(restart_each_time())
            [*_, last] = [delta async for delta in await poison]
            assert (last.finish_reason, "lost 4 times" in str(last.error)) == ("error", True)
            assert [await a for a in answers] == [[counted_tokens(p, 1500)] for p in prompts]
            assert len(here.lost) == 4
            restarts.cancel()

    run(test)


def test_streams_move_when_a_group_dies(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group(0)
            await here.group(1)
            stream = await here.stream()
            prompts = [[i + 1] for i in range(16)]
            deltas = [await stream.submit(request(f"r{i}", p, 500)) for i, p in enumerate(prompts)]
            answers = [asyncio.create_task(tokens_of(d)) for d in deltas]
            await eventually(lambda: here.service.scheduler.stats().generation_tokens > 200)
            here.service.close_group(0)
            assert [await a for a in answers] == [[counted_tokens(p, 500)] for p in prompts]

    run(test)


def test_a_request_that_was_on_two_dying_groups_takes_no_third(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            stream = await here.stream()
            poison = asyncio.create_task(stream.submit(request("poison", [1, 2])))
            for incarnation in ("a", "b"):
                [rank] = await here.group(incarnation=incarnation, held=True)
                await eventually(lambda: here.service.scheduler.stats().running == 1)
                here.service.close_group(0)
                rank.gate.set()
            endings = [delta async for delta in await poison]
            assert [delta.finish_reason for delta in endings] == ["error"]
            assert "2" in str(endings[0].error)
            await here.group(incarnation="c")
            assert await tokens_of(await stream.submit(request("next", [4]))) == [counted_tokens([4], 20)]

    run(test)


def test_a_broken_rank_loses_its_group(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            ranks = await here.group(size=2)
            stranger: BlockingClient[Open] = BlockingClient(here.service.rank_endpoint, Open)
            stranger.send(Open())  # no message of a rank: dropped
            await eventually(lambda: here.service.num_dropped == 1)
            stranger.close()
            stream = await here.stream()
            deltas = await stream.submit(request("r", [1, 2, 3], 100))
            ranks[1].gate.clear()
            here.service._ranks._on_lost(here.service._lines[0].peers[1])
            assert here.lost == [(0, "the connection to rank 1 broke")]
            await here.group(0, incarnation="b", size=2)
            assert await tokens_of(deltas) == [counted_tokens([1, 2, 3], 100)]

    run(test)


def test_a_step_that_takes_too_long_loses_the_group(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            [rank] = await here.group()
            stream = await here.stream()
            await tokens_of(await stream.submit(request("quick", [1])))
            here.service._step_timeout_s = 0.2
            await asyncio.sleep(1.3)  # idle for longer than a tick and the timeout: idle is not stuck
            assert here.lost == []
            rank.gate.clear()
            deltas = await stream.submit(request("r", [1, 2], 30))
            await eventually(lambda: len(here.lost) == 1)
            assert "0.2 s" in here.lost[0][1]
            here.service._step_timeout_s = 60.0
            await here.group(incarnation="b")
            assert await tokens_of(deltas) == [counted_tokens([1, 2], 30)]

    run(test)


def test_draining_takes_nothing_new_and_finishes_the_rest(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            await here.group()
            stream = await here.stream()
            deltas = await stream.submit(request("r", [1, 2], 300))
            drained = asyncio.create_task(here.service.drain(60.0))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await stream.submit(request("late", [1]))
            assert await tokens_of(deltas) == [counted_tokens([1, 2], 300)]
            assert await drained

    run(test)


def test_what_a_drain_cuts_off_ends_with_an_error(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            [rank] = await here.group()
            stream = await here.stream()
            rank.gate.clear()
            deltas = await stream.submit(request("r", [1, 2], 300))
            assert not await here.service.drain(0.1)
            rank.gate.set()
            here.service.close("the service is shutting down")
            endings = [d async for d in deltas if d.finish_reason is not None]
            assert [(d.finish_reason, d.error) for d in endings] == [("error", "the service is shutting down")]
            with pytest.raises(Unavailable):
                await stream.submit(request("late", [1]))
            here.service = here._new_service()

    run(test)


def test_a_deadline_is_on_the_callers_clock(counting_ranks: Callable[..., CountingRank]) -> None:
    async def test() -> None:
        async with stage(counting_ranks) as here:
            stream = await here.stream()
            stream._clock_offset_s += 0.0
            deltas = await stream.submit(request("r", [1], deadline_s=time.monotonic() + 0.1))
            assert [d.finish_reason async for d in deltas] == ["timeout"]

    run(test)

"""What routers hold goes on when the scheduler, a group, a rank or the way there is lost (see stream_stage.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from orcaserve.cluster.channel import BlockingClient, Endpoint
from orcaserve.cluster.service import SchedulerService
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import Open, Submit
from tests.cluster.stream_stage import eventually, request, run, stage, tokens_of
from tests.conftest import CountingRank, counted_tokens


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

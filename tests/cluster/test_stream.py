"""Router streams and the scheduler's service while nothing dies (see stream_stage.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from orcaserve.cluster.channel import Client
from orcaserve.cluster.wire import Accepted, Open, Submit, ToRouter, Welcome
from orcaserve.engine.errors import ContextLengthExceeded, QueueFull, RequestRefused, Unavailable
from tests.cluster.stream_stage import CONFIG, eventually, request, run, stage, tokens_of
from tests.conftest import CountingRank, counted_tokens


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

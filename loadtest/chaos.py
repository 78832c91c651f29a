"""The drill: streams under way while parts of the service die, each compared with its text when nothing happens.

Streams are those of our own client with `resume`, over HTTP, greedy ones and seeded ones. The service must run in
float32, where a request's tokens do not depend on its company.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np

from orcaserve.cluster.client_async import AsyncClient
from orcaserve.cluster.client_errors import OrcaserveError
from orcaserve.cluster.client_retry import RetryPolicy
from orcaserve.loadtest.faults import FAULT_KINDS, FaultKind, Injector, schedule
from orcaserve.loadtest.prompts import PromptMaker
from orcaserve.loadtest.workload import LoadRequest

_PATIENCE = RetryPolicy(max_retries=300, first_delay_s=0.1, max_delay_s=0.5)
_TIMEOUT = httpx.Timeout(90.0, connect=5.0)  # a stream that is silent for this long is lost
_ON_THE_WAY_S = 0.1  # a token that comes this soon after a fault was sent before it
_POLL_S = 0.1


class DrillOptions(msgspec.Struct, frozen=True, kw_only=True):
    kinds: tuple[FaultKind, ...]
    num_faults: int
    seed: int = 0
    users: int = 12
    num_cases: int = 10
    prompt_tokens: tuple[int, int] = (5, 200)
    output_tokens: tuple[int, int] = (60, 180)
    every_s: float = 0.0  # by the clock; 0: at random
    mean_gap_s: float = 1.0  # at random: this long after the service is whole again
    wounded_share: float = 0.2  # of the faults at random that do not wait for that
    heal_timeout_s: float = 180.0
    limit_s: float = 0.0  # no more faults after this long; 0: all of them, however long that takes


class Case(msgspec.Struct, frozen=True):
    """One request of the drill, and what it comes to undisturbed."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    token_ids: list[int] = []
    text: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Seconds from a fault to the next token of each stream that was under way."""

    streams: int
    p50: float
    max: float
    p50_of_slowest: float  # the last stream to go on after each fault, in the middle of all faults


class DrillReport(msgspec.Struct, frozen=True, kw_only=True):
    faults: dict[str, int]
    accepted: int
    identical: int  # ids and text of the solo run; of a stream that its client closed, as far as it came
    lost: int
    repeated_tokens: int
    missing_tokens: int
    recovery_s: dict[str, Spread]
    leaked_blocks: int
    whole_again: bool  # all groups ready after the last fault
    closed_by_client: int
    duration_s: float
    errors: list[str]

    @property
    def passed(self) -> bool:
        return self.identical == self.accepted and not (self.lost or self.leaked_blocks) and self.whole_again


@dataclass(eq=False)
class Stream:
    """One stream of the drill, as far as it has come."""

    case: Case
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    closed: bool = False
    error: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        return bool(self.arrivals_s) and self.task is not None and not self.task.done()

    @property
    def identical(self) -> bool:
        if self.closed:
            return self.case.token_ids[: len(self.token_ids)] == self.token_ids and self.case.text.startswith(self.text)
        return not self.error and self.token_ids == self.case.token_ids and self.text == self.case.text

    def differences(self) -> tuple[int, int]:
        """Tokens too many and tokens too few, against the solo run."""
        wanted = self.case.token_ids[: len(self.token_ids)] if self.closed or self.error else self.case.token_ids
        repeated = missing = 0
        for kind, from_a, to_a, from_b, to_b in difflib.SequenceMatcher(
            None, wanted, self.token_ids, autojunk=False
        ).get_opcodes():
            if kind != "equal":
                missing += to_a - from_a
                repeated += to_b - from_b
        return repeated, missing

    async def run(self, client: AsyncClient) -> None:
        """Raises OrcaserveError when it is lost."""
        case = self.case
        chunks = client.stream_complete(
            case.prompt,
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            seed=11,
            ignore_eos=True,
            return_token_ids=True,
            resume=True,
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                self.text += choice.text
                if choice.token_ids:
                    self.token_ids.extend(choice.token_ids)
                    self.arrivals_s.append(time.monotonic())


class Drill:
    """Call `run` once."""

    def __init__(self, url: str, injector: Injector, options: DrillOptions, say: Callable[[str], None]) -> None:
        self._url = url
        self._injector = injector
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._faults: list[tuple[FaultKind, float, list[Stream]]] = []
        self._running: set[Stream] = set()
        self._streams: list[Stream] = []
        self._over = False
        self._whole_again = True

    async def run(self) -> DrillReport:
        """Solo runs, then faults among running streams, then a look at what is left."""
        began_s = time.monotonic()
        async with AsyncClient(self._url, timeout=_TIMEOUT, retry=_PATIENCE, rng=random.Random(1)) as client:
            self._say(f"{self._options.num_cases} requests, each alone")
            cases = [await _solo(case, client) for case in self._cases()]
            users = [asyncio.create_task(self._user(cases, client)) for _ in range(self._options.users)]
            try:
                await self._strike_all(client)
            except TimeoutError:
                self._say(f"not whole again within {self._options.heal_timeout_s:g} s, the drill ends here")
                self._whole_again = False
            self._over = True
            await asyncio.gather(*users)
            leaked = await _leaked_blocks(client)
        return self._report(leaked, time.monotonic() - began_s)

    def _cases(self) -> list[Case]:
        rng = np.random.default_rng(self._options.seed)
        maker = PromptMaker(self._options.seed)
        cases = []
        for i in range(self._options.num_cases):
            (prompt, output) = (int(rng.integers(*span)) for span in self._spans())
            cases.append(Case(maker.ids(LoadRequest(i, prompt, output)), output, 0.0 if i % 2 else 0.8))
        return cases

    def _spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self._options.prompt_tokens, self._options.output_tokens

    # Load

    async def _user(self, cases: list[Case], client: AsyncClient) -> None:
        """One stream after another until the drill is over."""
        while not self._over:
            stream = Stream(self._rng.choice(cases))
            stream.task = asyncio.create_task(stream.run(client))
            self._running.add(stream)
            try:
                await stream.task
            except OrcaserveError as error:
                stream.error = f"{type(error).__name__}: {error}"
                self._say(f"lost after {len(stream.token_ids)} tokens: {stream.error}")
            except asyncio.CancelledError:
                if not stream.closed:
                    raise
            self._running.discard(stream)
            self._streams.append(stream)

    # Faults

    async def _strike_all(self, client: AsyncClient) -> None:
        options, began_s = self._options, time.monotonic()
        await self._whole(client)
        for number, kind in enumerate(schedule(options.kinds, options.num_faults, self._rng)):
            if options.every_s:
                await asyncio.sleep(options.every_s)
            else:
                if self._rng.random() >= options.wounded_share:
                    await self._whole(client)
                await asyncio.sleep(self._rng.expovariate(1 / options.mean_gap_s))
            await self._strike(kind)
            self._say(f"{number + 1}/{options.num_faults} {kind}, {len(self._running)} streams under way")
            if options.limit_s and time.monotonic() - began_s > options.limit_s:
                break
        await self._whole(client)

    async def _strike(self, kind: FaultKind) -> None:
        """With streams under way, as soon as there is somebody to strike."""
        async with asyncio.timeout(self._options.heal_timeout_s):
            while True:
                under_way = [stream for stream in self._running if stream.under_way]
                if under_way and (self._close_one(under_way) if kind == "client_closed" else await self._hit(kind)):
                    break
                await asyncio.sleep(_POLL_S)
        self._faults.append((kind, time.monotonic(), under_way))

    async def _hit(self, kind: FaultKind) -> bool:
        return await asyncio.to_thread(self._injector.strike, kind)

    def _close_one(self, under_way: list[Stream]) -> bool:
        stream = self._rng.choice(under_way)
        assert stream.task is not None
        stream.closed = True
        return stream.task.cancel()

    async def _whole(self, client: AsyncClient) -> None:
        """Wait until every group is ready and the front door says so."""
        async with asyncio.timeout(self._options.heal_timeout_s):
            while True:
                with contextlib.suppress(OrcaserveError):
                    status = await client.cluster_status()
                    if status.ready and status.groups and all(group.state == "ready" for group in status.groups):
                        return
                await asyncio.sleep(_POLL_S)

    # What came of it

    def _report(self, leaked_blocks: int, duration_s: float) -> DrillReport:
        accepted = [stream for stream in self._streams if stream.arrivals_s or stream.error or not stream.closed]
        differences = [stream.differences() for stream in accepted]
        return DrillReport(
            faults=dict(Counter(kind for kind, _, _ in self._faults)),
            accepted=len(accepted),
            identical=sum(stream.identical for stream in accepted),
            lost=sum(bool(stream.error) for stream in accepted),
            repeated_tokens=sum(repeated for repeated, _ in differences),
            missing_tokens=sum(missing for _, missing in differences),
            recovery_s=self._recoveries(),
            leaked_blocks=leaked_blocks,
            whole_again=self._whole_again,
            closed_by_client=sum(stream.closed for stream in accepted),
            duration_s=round(duration_s, 1),
            errors=sorted({stream.error for stream in accepted if stream.error}),
        )

    def _recoveries(self) -> dict[str, Spread]:
        found: dict[str, list[list[float]]] = {}
        for kind, at_s, streams in self._faults:
            waits = [_wait(stream.arrivals_s, at_s) for stream in streams]
            if known := [wait for wait in waits if wait is not None]:
                found.setdefault(kind, []).append(known)
        return {kind: _spread(faults) for kind, faults in sorted(found.items()) if kind != "client_closed"}


def parse_kinds(text: str, num_nodes: int) -> tuple[FaultKind, ...]:
    """Those named, or all that can happen there. Raises ValueError."""
    possible = FAULT_KINDS if num_nodes else tuple(kind for kind in FAULT_KINDS if kind != "node_lost")
    wanted = tuple(kind for kind in possible if not text or kind in text.split(","))
    if text and len(wanted) != len(text.split(",")):
        raise ValueError(f"kinds: {text!r} must name some of {', '.join(possible)}")
    return wanted


def _wait(arrivals_s: list[float], fault_s: float) -> float | None:
    """None for a stream that had nothing left to say."""
    return next((at_s - fault_s for at_s in arrivals_s if at_s > fault_s + _ON_THE_WAY_S), None)


def _spread(faults: list[list[float]]) -> Spread:
    waits = np.concatenate(faults)
    return Spread(
        streams=len(waits),
        p50=round(float(np.median(waits)), 3),
        max=round(float(waits.max()), 3),
        p50_of_slowest=round(float(np.median([max(fault) for fault in faults])), 3),
    )


async def _solo(case: Case, client: AsyncClient) -> Case:
    stream = Stream(case)
    await stream.run(client)
    return msgspec.structs.replace(case, token_ids=stream.token_ids, text=stream.text)


async def _leaked_blocks(client: AsyncClient, within_s: float = 5.0) -> int:
    """KV blocks that are in use though nothing runs."""
    deadline_s = time.monotonic() + within_s
    while True:
        groups = (await client.cluster_status()).scheduler["groups"]
        used = sum(group["used_blocks"] for group in groups)
        if not used or time.monotonic() > deadline_s:
            return used
        await asyncio.sleep(_POLL_S)

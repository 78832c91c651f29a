"""A router replica's end of the line to the scheduler: requests out, one stream of deltas in, for all its requests.

What a replica has accepted it keeps until it is answered: the request and the ids so far. When the scheduler dies or
the line breaks, the replica says it all again to whoever answers next, and each request goes on from its ids.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from orcaserve.cluster.channel import Client, Endpoint
from orcaserve.cluster.figures import FigureSet
from orcaserve.cluster.stream_bell import Bell
from orcaserve.cluster.stream_deltas import Deltas
from orcaserve.cluster.stream_held import Held, HeldChoice, as_continued
from orcaserve.cluster.stream_questions import Questions
from orcaserve.cluster.wire import (
    Abort,
    Accepted,
    AskStatus,
    AskView,
    ClusterStatus,
    Farewell,
    FromRouter,
    NodeLeaves,
    Open,
    Refused,
    Report,
    StatusReply,
    Submit,
    ToRouter,
    View,
    ViewReply,
    Welcome,
)
from orcaserve.engine.errors import Unavailable
from orcaserve.engine.messages import GenerateRequest, StepDeltas, TokenDelta

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # how long a new request waits for a scheduler that is away
SUSPICIOUS_LOSSES = 2  # a request that got no token between so many losses is said again alone
MAX_SCHEDULER_LOSSES = 3  # and after more of them it is ended with an error
_TRIAL_S = 1.0  # a suspect that has got no token by then was not what kills schedulers
_RECONNECT_PAUSE_S = (0.05, 0.25)
_AWAY = "the scheduler is being restarted"


class EngineStream:
    """One per router replica. `locate` asks for the scheduler's present endpoint."""

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]], node_id: str = "") -> None:
        self.leaving = False  # this node is about to go
        self._locate = locate
        self._node_id = node_id
        self._client: Client[ToRouter] | None = None
        self._connected = asyncio.Event()
        self._hung_up = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._farewell = ""
        self._epoch = 0  # connections so far; a request has a new name on the wire in each
        self._clock_offset_s = 0.0  # the scheduler's clock minus ours
        self._held: dict[str, tuple[Held, HeldChoice | None]] = {}  # by name on the wire; no choice: all of them
        self._questions = Questions()
        self._bell = Bell(asyncio.get_running_loop())
        self._late: set[asyncio.TimerHandle] = set()
        self._suspects: deque[Held] = deque()  # to be said one after another
        self._on_trial: Held | None = None

    async def start(self) -> None:
        """Returns once the scheduler has answered."""
        self._reconnect()
        await self._connected.wait()

    @property
    def num_held(self) -> int:
        return len(self._each_held())

    async def submit(self, request: GenerateRequest) -> Deltas:
        """Returns once the scheduler has accepted. Raises RequestRefused.

        `deadline_s` is on this process's time.monotonic().
        """
        if self._farewell:
            raise Unavailable(self._farewell, retry_after_s=1.0)
        if request.request_id in self._held:
            raise AssertionError(f"request id {request.request_id} is in use")
        await self._wait_connected()
        ids = list(request.output_token_ids)
        choices = [HeldChoice(request.choice_index + i, list(ids)) for i in range(request.n)]
        verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held = Held(request, choices, [request.request_id], verdict)
        self._held[request.request_id] = (held, None)
        self._send(Submit(self._translated(request), resumed=False))
        try:
            await verdict
        except BaseException:
            self._forget(held)
            raise
        return Deltas(held, self._forget, self._forget_choice)

    async def status(self, timeout_s: float = 2.0) -> ClusterStatus:
        """Raises Unavailable when the scheduler does not answer in time."""
        return await self._ask(AskStatus, timeout_s)

    async def view(self, after: int | None = None, traced: bool = False, timeout_s: float = 2.0) -> View:
        """Figures of the whole service, and with `after` what came after it (see wire.AskView). Raises Unavailable."""
        return await self._ask(lambda call_id: AskView(call_id, after, traced), timeout_s)

    def report(self, figures: FigureSet) -> bool:
        """Hand on what was added to this router's figures. False when nobody is there to take it."""
        return self._client is not None and self._connected.is_set() and self._client.send(Report(figures))

    async def _ask(self, question: Callable[[int], AskStatus | AskView], timeout_s: float) -> Any:
        if self._client is None or not self._connected.is_set():
            raise Unavailable(_AWAY, retry_after_s=1.0)
        return await self._questions.ask(self._send, question, timeout_s)

    async def close(self) -> None:
        """Abort what is running and hang up."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for timer in self._late:
            timer.cancel()
        self._end_all("the router is stopping")
        self._bell.close()
        if self._client is not None:
            self._client.close()

    # Sending

    def _send(self, message: FromRouter) -> None:
        if self._client is not None:
            self._client.send(message)

    def _each_held(self) -> list[Held]:
        return list({id(held): held for held, _ in self._held.values()}.values())

    def _translated(self, request: GenerateRequest) -> GenerateRequest:
        if request.deadline_s is None:
            return request
        return msgspec.structs.replace(request, deadline_s=request.deadline_s + self._clock_offset_s)

    def _forget(self, held: Held) -> None:
        """Nobody reads it any more: free what it holds on the scheduler's side."""
        if held.done and not held.wire_ids:
            return
        for choice in held.choices:
            choice.finished = True
        for wire_id in held.wire_ids:
            if self._held.pop(wire_id, None) is not None:
                self._send(Abort(wire_id))
        held.wire_ids = []
        held.wake()

    def _forget_choice(self, held: Held, choice_index: int) -> None:
        choice = held.choices[choice_index - held.request.choice_index]
        if choice.finished:
            return
        choice.finished = True
        for wire_id in held.wire_ids:
            if self._held[wire_id][1] is choice:  # it was said again, under a name of its own
                self._send(Abort(wire_id))
            elif self._held[wire_id][1] is None:
                self._send(Abort(wire_id, choice_index))
        if held.done:
            self._release(held)
            held.wake()

    # Receiving

    def _on_message(self, message: ToRouter) -> None:
        if isinstance(message, StepDeltas):
            for delta in message.deltas:
                self._on_delta(delta)
            self._bell.ring()
        elif isinstance(message, Accepted):
            self._on_accepted(message.request_id)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, StatusReply):
            self._questions.answer(message.call_id, message.status)
        elif isinstance(message, ViewReply):
            self._questions.answer(message.call_id, message.view)
        elif isinstance(message, NodeLeaves):
            self.leaving = True
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Farewell):
            self._farewell = message.reason
            self._end_all(message.reason)

    def _on_delta(self, delta: TokenDelta) -> None:
        entry = self._held.get(delta.request_id)
        if entry is None:
            return  # aborted a moment ago
        held, choice = entry
        if choice is None:
            choice = held.choices[delta.choice_index - held.request.choice_index]
        if choice.finished:
            return  # aborted a moment ago
        choice.ids.extend(delta.token_ids)
        if delta.request_id != held.request.request_id:
            delta = as_continued(delta, held.request.request_id, choice.started)
        choice.started = held.progressed = True
        if delta.finish_reason is not None:
            choice.finished = True
            if held.done:
                self._release(held)
        if held.deliver(delta):
            self._bell.add(held)
        if held is self._on_trial:
            self._try_next_suspect()

    def _on_accepted(self, wire_id: str) -> None:
        entry = self._held.get(wire_id)
        if entry is not None and entry[0].verdict is not None and not entry[0].verdict.done():
            entry[0].verdict.set_result(None)

    def _on_refused(self, refused: Refused) -> None:
        entry = self._held.get(refused.request_id)
        if entry is None:
            return
        held, choice = entry
        refusal = refused.as_exception()
        if choice is None and held.verdict is not None and not held.verdict.done():
            self._held.pop(refused.request_id)
            held.wire_ids = []
            held.verdict.set_exception(refusal)
        elif refusal.status in (429, 503):
            self._later(random.uniform(0.2, 0.5), lambda: self._say_again(refused.request_id))
        else:
            self._end(held, choice or held.choices[0], refusal.message)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._clock_offset_s = welcome.now_s - time.monotonic()
        self._connected.set()
        suspects = []
        # Shortest first: each is computed again from its start, and so most of them go on soonest.
        for held in sorted(self._each_held(), key=lambda held: held.num_tokens):
            if held.num_losses < SUSPICIOUS_LOSSES:
                self._resume(held)
            else:
                held.on_hold = True
                suspects.append(held)
        random.shuffle(suspects)
        self._suspects = deque(suspects)
        self._try_next_suspect()

    # After a loss

    def _on_lost(self) -> None:
        self._client = None
        self._hung_up.set()
        if not self._connected.is_set() or self._closed:
            return
        self._connected.clear()
        self._questions.give_up(_AWAY)
        for held in self._each_held():
            if not held.on_hold:
                held.num_losses = 1 if held.progressed else held.num_losses + 1
            held.on_hold = held.progressed = False
        self._on_trial = None
        if not self._farewell:
            logger.warning("lost the scheduler; %d requests wait for its return", self.num_held)
            self._reconnect()

    def _reconnect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        while not self._connected.is_set():
            try:
                await self._call()
            except (ConnectionError, TimeoutError) as error:
                logger.info("no scheduler yet: %s", error)
            except Exception:  # whatever it is: without this task the router is deaf for good
                logger.warning("could not connect to the scheduler", exc_info=True)
            if not self._connected.is_set():
                await asyncio.sleep(random.uniform(*_RECONNECT_PAUSE_S))

    async def _call(self) -> None:
        """Connect if the scheduler is there and answers in time."""
        endpoint = await self._locate()
        self._epoch += 1
        self._hung_up.clear()
        self._client = Client(endpoint, ToRouter, self._on_message, self._on_lost)
        try:
            self._client.send(Open(self._node_id))
            await _first(self._connected, self._hung_up, CONNECT_TIMEOUT_S)
        finally:
            if not self._connected.is_set() and self._client is not None:
                self._client.close()
                self._client = None

    async def _wait_connected(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable(_AWAY, retry_after_s=1.0) from None

    def _try_next_suspect(self) -> None:
        """Schedulers die with one of them unanswered: each is said when the one before has got a token or had time to.

        So the others of this router live on, and only what is said again and again without a token is given up.
        """
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            held = self._suspects.popleft()
            held.on_hold = False
            if not held.done:
                self._on_trial = held
                self._resume(held)
                if held.done:  # given up
                    self._on_trial = None
        if (tried := self._on_trial) is not None:
            self._later(_TRIAL_S, lambda: self._try_next_suspect() if self._on_trial is tried else None)

    def _resume(self, held: Held) -> None:
        """Say a request again under a new name: whole if nothing is known of it yet, else choice by choice."""
        for wire_id in held.wire_ids:
            self._held.pop(wire_id, None)
        held.wire_ids = []
        if held.num_losses > MAX_SCHEDULER_LOSSES:
            if held.verdict is not None and not held.verdict.done():
                held.verdict.set_result(None)  # nobody said yes, but the answer is an error, not a refusal
            for choice in held.choices:
                self._end(held, choice, f"the scheduler was lost {held.num_losses} times during this request")
            return
        if held.verdict is not None and not held.verdict.done():
            self._say(held, None)
            return
        for choice in held.choices:
            if not choice.finished:
                self._say(held, choice)

    def _say(self, held: Held, choice: HeldChoice | None) -> None:
        suffix = "" if choice is None else f".{choice.index}"
        wire_id = f"{held.request.request_id}~{self._epoch}{suffix}"
        held.wire_ids.append(wire_id)
        self._held[wire_id] = (held, choice)
        self._say_again(wire_id)

    def _say_again(self, wire_id: str) -> None:
        if (entry := self._held.get(wire_id)) is None:
            return
        held, choice = entry
        request = msgspec.structs.replace(self._translated(held.request), request_id=wire_id)
        if choice is not None:
            request = msgspec.structs.replace(
                request,
                n=1,
                choice_index=choice.index,
                output_token_ids=tuple(choice.ids),
                deadline_s=None if choice.started else request.deadline_s,
            )
        self._send(Submit(request, resumed=choice is not None))

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def run() -> None:
            self._late.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._late.add(timer)

    # Endings

    def _release(self, held: Held) -> None:
        for wire_id in held.wire_ids:
            self._held.pop(wire_id, None)
        held.wire_ids = []

    def _end(self, held: Held, choice: HeldChoice, error: str) -> None:
        if not choice.finished:
            choice.finished = True
            held.deliver(TokenDelta(held.request.request_id, choice.index, (), finish_reason="error", error=error))
            held.wake()
        if held.done:
            self._release(held)

    def _end_all(self, reason: str) -> None:
        for held in self._each_held():
            if held.verdict is not None and not held.verdict.done():
                self._release(held)
                held.verdict.set_exception(Unavailable(reason, retry_after_s=1.0))
                continue
            for choice in held.choices:
                self._end(held, choice, reason)


async def _first(one: asyncio.Event, other: asyncio.Event, timeout_s: float) -> None:
    """Wait until either is set or the time is up."""
    waits = [asyncio.ensure_future(one.wait()), asyncio.ensure_future(other.wait())]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

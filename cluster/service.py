"""The scheduler at work: the engine's state machine between the routers' and the ranks' channels. No Ray in here.

Everything happens in callbacks of one event loop: a message comes in, the engine is asked, messages go out. Nothing
runs while nothing comes, but for a look at the clock once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from orcaserve.cluster.auth import read_tenants
from orcaserve.cluster.channel import Endpoint, Peer, Server
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.neighbours import Neighbours
from orcaserve.cluster.observer import Flight, Observer
from orcaserve.cluster.wire import (
    Abort,
    Accepted,
    AskStatus,
    AskView,
    ClusterStatus,
    Done,
    Failed,
    Farewell,
    FromRank,
    FromRouter,
    Hello,
    Holds,
    Leave,
    NodeLeaves,
    NodeSeen,
    Open,
    Refused,
    Report,
    StatusReply,
    Step,
    Submit,
    Timed,
    ViewReply,
    Welcome,
)
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.errors import RequestRefused, Unavailable
from orcaserve.engine.messages import StepDeltas, StepResult, TokenDelta
from orcaserve.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

TICK_S = 1.0


@dataclass(slots=True)
class _Line:
    """The connections to one group's ranks, and the plans that they work on."""

    group_id: int
    incarnation: str
    peers: list[Peer | None]
    hellos: dict[Peer, Hello] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    stepping: bool = False  # the engine knows the group
    in_flight: deque[Flight] = field(default_factory=deque)  # oldest first
    waiting_since_s: float = 0.0  # for the oldest one's result


class SchedulerService:
    """`on_group_lost(group_id, reason)` is called once for each group that broke while it was attached."""

    def __init__(
        self,
        config: SchedulerConfig,
        host: str,
        step_timeout_s: float,
        clock: Callable[[], float],
        on_group_lost: Callable[[int, str], None],
        status: Callable[[], ClusterStatus],
    ) -> None:
        self.scheduler = Scheduler(config)
        self.draining = False
        self.observer = Observer(config, clock)
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._on_group_lost = on_group_lost
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._routers: Server[FromRouter] = Server(host, FromRouter, self._on_router, self._on_router_lost)
        self._ranks: Server[FromRank] = Server(host, FromRank, self._on_rank, self._on_rank_lost)
        self._stream_of: dict[Peer, int] = {}
        self._peer_of: dict[int, Peer] = {}
        self._node_of: dict[Peer, str] = {}
        self._leaving: set[str] = set()  # nodes
        self._num_streams = 0
        self._neighbours = Neighbours(self.scheduler, self._ranks.send)
        self._lines: dict[int, _Line] = {}
        self._line_of: dict[Peer, tuple[_Line, int]] = {}
        self._pump_due = False
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    @property
    def router_endpoint(self) -> Endpoint:
        return self._routers.endpoint

    @property
    def rank_endpoint(self) -> Endpoint:
        return self._ranks.endpoint

    @property
    def num_routers(self) -> int:
        return len(self._stream_of)

    @property
    def num_dropped(self) -> int:
        return self._routers.num_dropped + self._ranks.num_dropped

    @property
    def num_refused(self) -> int:
        return self._routers.num_refused + self._ranks.num_refused

    # Groups

    def expect_group(self, group_id: int, incarnation: str, size: int) -> asyncio.Event:
        """Make ready for a group's ranks; the event is set when all of them have said hello."""
        assert group_id not in self._lines
        line = self._lines[group_id] = _Line(group_id, incarnation, [None] * size)
        return line.complete

    def open_group(self, group_id: int, num_blocks: int) -> None:
        """All ranks are there and ready: give the group work."""
        line = self._lines[group_id]
        assert line.complete.is_set()
        hellos = {peer: line.hellos[peer] for peer in line.peers if peer is not None}
        # All ranks have carried out the same plans.
        self.scheduler.add_group(group_id, num_blocks, next(iter(hellos.values())).kept)
        self._neighbours.join(group_id, hellos)
        line.stepping = True
        self.observer.note("group ready", f"group {group_id}: {num_blocks} KV blocks")
        self._pump_soon()

    def close_group(self, group_id: int) -> None:
        """The group is gone or drained; what it was working on waits again."""
        line = self._lines.pop(group_id, None)
        if line is None:
            return
        for peer in line.peers:
            if peer is not None:
                self._line_of.pop(peer, None)
                self._ranks.send(peer, Leave())
        if line.stepping:
            self._publish(self.scheduler.remove_group(group_id, self._clock()))
            self._neighbours.leave(group_id)
            self._pump_soon()

    def drain_group(self, group_id: int) -> None:
        """Give it nothing new; what it runs goes on."""
        line = self._lines.get(group_id)
        if line is not None and line.stepping:
            self.scheduler.drain_group(group_id)

    def num_running(self, group_id: int) -> int:
        return sum(group.running for group in self.scheduler.stats().groups if group.group_id == group_id)

    def is_stuck(self, group_id: int, limit_s: float) -> bool:
        """Work is out and nothing has come back for `limit_s`; an idle group is never stuck."""
        line = self._lines.get(group_id)
        return line is not None and bool(line.in_flight) and self._clock() - line.waiting_since_s > limit_s

    # A node that goes

    def leave_node(self, node_id: str) -> None:
        """Tell the routers there that they get no successor's work; what they hold goes on."""
        if node_id not in self._leaving:
            self._leaving.add(node_id)
            self.observer.note("node leaves", f"node {node_id[:8]}")
        for peer, node in self._node_of.items():
            if node == node_id:
                self._routers.send(peer, NodeLeaves())

    def num_open_on(self, node_id: str) -> int:
        """Choices that clients of this node's routers still wait for."""
        streams = {self._stream_of[peer] for peer, node in self._node_of.items() if node == node_id}
        return self.scheduler.num_open(streams) if streams else 0

    def _nodes(self, status: ClusterStatus) -> list[NodeSeen]:
        """Where groups and routers are."""
        ids = {*self._node_of.values(), *(node for group in status.groups for node in group.node_ids)}
        return [
            NodeSeen(
                node,
                [group.group_id for group in status.groups if node in group.node_ids],
                sum(group.node_ids.count(node) for group in status.groups),
                sum(of_router == node for of_router in self._node_of.values()),
                node in self._leaving,
            )
            for node in sorted(ids)
        ]

    # The end

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new; True when all that was accepted has ended in time."""
        self.draining = True
        deadline_s = self._clock() + timeout_s
        while self._num_open_requests() and self._clock() < deadline_s:
            await asyncio.sleep(0.05)
        return not self._num_open_requests()

    def close(self, reason: str) -> None:
        """Tell the routers that what still runs ends here."""
        for peer in list(self._stream_of):
            self._routers.send(peer, Farewell(reason))
        for line in list(self._lines.values()):
            for rank in line.peers:
                if rank is not None:
                    self._ranks.send(rank, Leave())
        self.vanish()

    def vanish(self) -> None:
        """Hang up on everyone, as a crash would."""
        self._ticker.cancel()
        self._routers.close()
        self._ranks.close()

    def _num_open_requests(self) -> int:
        stats = self.scheduler.stats()
        return stats.running + stats.waiting

    # Routers

    def _on_router(self, peer: Peer, message: FromRouter) -> None:
        if isinstance(message, Open):
            self._num_streams += 1
            self._stream_of[peer] = self._num_streams
            self._peer_of[self._num_streams] = peer
            self._node_of[peer] = message.node_id
            self._routers.send(peer, Welcome(self._clock()))
            self.observer.note("router", f"router {self._num_streams} connected")
        elif peer not in self._stream_of:
            return  # whoever has not said who it is gets nothing
        elif isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self.scheduler.abort(message.request_id, message.choice_index)
            self._pump_soon()
        elif isinstance(message, AskStatus):
            self._routers.send(peer, StatusReply(message.call_id, self._status()))
        elif isinstance(message, Report):
            self.observer.figures.add(message.figures)
        elif isinstance(message, AskView):
            status = self._status()
            view = self.observer.view(status, self._nodes(status), message.after, message.traced)
            self._routers.send(peer, ViewReply(message.call_id, view))

    def _submit(self, peer: Peer, message: Submit) -> None:
        request_id = message.request.request_id
        try:
            if self.draining and not message.resumed:
                raise Unavailable("the service is shutting down", retry_after_s=5.0)
            request = msgspec.structs.replace(message.request, stream=self._stream_of[peer])
            self.scheduler.add(request, self._clock())
        except RequestRefused as refusal:
            self._routers.send(peer, Refused.of(request_id, refusal))
            return
        self._routers.send(peer, Accepted(request_id))
        self._pump_soon()

    def _on_router_lost(self, peer: Peer) -> None:
        if (stream := self._stream_of.pop(peer, None)) is not None:
            del self._peer_of[stream], self._node_of[peer]
            self.observer.note("router", f"router {stream} is gone; its requests end")
            logger.warning("router of stream %d is gone; its requests end", stream)
            self.scheduler.abort_stream(stream)
            self._pump_soon()

    def _publish(self, deltas: dict[int, list[TokenDelta]]) -> None:
        for stream, batch in deltas.items():
            if (peer := self._peer_of.get(stream)) is not None:
                self._routers.send(peer, StepDeltas(batch))

    # Ranks

    def _on_rank(self, peer: Peer, message: FromRank) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            return
        if (entry := self._line_of.get(peer)) is None:
            return  # its group was given up a moment ago
        line, rank = entry
        if isinstance(message, Failed):
            self._lose_group(line, f"rank {rank}: {message.error}")
        elif isinstance(message, Done):
            self._on_result(line, message.result)
        elif isinstance(message, Holds):
            self._neighbours.on_holds(line.group_id, message)
        elif isinstance(message, Timed):
            self.observer.timed(line.group_id, rank, message)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        line = self._lines.get(hello.group_id)
        if line is None or line.incarnation != hello.incarnation:
            self._ranks.send(peer, Leave())
            return
        line.peers[hello.rank] = peer
        line.hellos[peer] = hello
        self._line_of[peer] = (line, hello.rank)
        if all(p is not None for p in line.peers):
            line.complete.set()

    def _on_rank_lost(self, peer: Peer) -> None:
        if (entry := self._line_of.pop(peer, None)) is not None:
            line, rank = entry
            self._lose_group(line, f"the connection to rank {rank} broke")

    def _on_result(self, line: _Line, result: StepResult) -> None:
        assert line.in_flight
        flight = line.in_flight.popleft()
        assert flight.plan.step_id == result.step_id, (flight.plan.step_id, result.step_id)
        last_s, now_s = line.waiting_since_s, self._clock()
        line.waiting_since_s = now_s
        deltas = self.scheduler.apply(line.group_id, result, now_s)
        applied_s = self._clock()
        self._publish(deltas)
        published_s = self._clock()
        self._pump(line)
        self.observer.landed(line.group_id, flight, result, last_s, (now_s, applied_s, published_s))

    def _lose_group(self, line: _Line, reason: str) -> None:
        if self._lines.get(line.group_id) is line:
            logger.error("group %d is lost: %s", line.group_id, reason)
            self.observer.note("group lost", f"group {line.group_id}: {reason}")
            self.close_group(line.group_id)
            self._on_group_lost(line.group_id, reason)

    # Steps

    def _pump_soon(self) -> None:
        """Once for all that this turn of the event loop brings, so that what arrives together starts together."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump_all)

    def _pump_all(self) -> None:
        self._pump_due = False
        for line in list(self._lines.values()):
            if line.stepping:
                self._pump(line)
        self._publish(self.scheduler.expire(self._clock()))  # with what ended at the door or while it waited

    def _pump(self, line: _Line) -> None:
        now_s = self._clock()
        while (plan := self.scheduler.schedule(line.group_id, now_s)) is not None:
            flight = Flight(plan, now_s, self._clock())
            self._send_plan(line, flight)
            now_s = flight.sent_s = self._clock()

    def _send_plan(self, line: _Line, flight: Flight) -> None:
        if not line.in_flight:
            line.waiting_since_s = flight.planned_s
        line.in_flight.append(flight)
        step = Step(flight.plan, self.observer.traces(flight.planned_s))
        for peer in line.peers:
            assert peer is not None
            self._ranks.send(peer, step)  # a rank that is gone makes itself known as lost

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._publish(self.scheduler.expire(self._clock()))
        self._neighbours.tidy()
        self.observer.tick(self._clock())
        for line in list(self._lines.values()):
            if self.is_stuck(line.group_id, self._step_timeout_s):
                self._lose_group(line, f"no result of a step for {self._step_timeout_s:g} s")


def scheduler_config(config: ServeConfig, model: ModelInfo) -> SchedulerConfig:
    """The engine's share of the operator's options: those that it has a field for."""
    shared = {name: value for name, value in config if name in SchedulerConfig.__struct_fields__}
    tenants = read_tenants(config.tenants_file) if config.tenants_file is not None else []
    return SchedulerConfig(
        **{**shared, "max_model_len": model.max_model_len},
        eos_token_ids=model.eos_token_ids,
        tenant_weights={tenant.name: tenant.weight for tenant in tenants},
    )

"""What travels on the channels of the cluster: between router replicas and the scheduler, and on to the ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from orcaserve.cluster.figures import Buckets, FigureSet
from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter, QueueFull, RequestRefused, Unavailable
from orcaserve.engine.messages import GenerateRequest, PoolFile, SlotKv, StepDeltas, StepPlan, StepResult
from orcaserve.engine.stats import SchedulerStats

GroupState = Literal["starting", "ready", "draining", "dead"]


class GroupStatus(msgspec.Struct, frozen=True):
    group_id: int
    state: GroupState
    phase: str  # what a starting group is doing: "placing", "loading", "allocating", "warming up"
    num_kv_blocks: int
    num_starts: int  # 1 for a group that never died
    node_ids: list[str]
    pids: list[int]
    error: str  # why it died last
    load_s: float  # from placing to ready


class ClusterStatus(msgspec.Struct, frozen=True):
    """One consistent look at the whole service; `/ready`, `/metrics` and the console are made of it."""

    ready: bool  # a group has generated a token, none of its work is stuck, and new requests are taken
    draining: bool
    groups: list[GroupStatus]
    scheduler: SchedulerStats
    num_routers: int
    num_dropped_messages: int
    num_refused_connections: int
    num_group_losses: int
    uptime_s: float
    scheduler_pid: int


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something that an operator wants to know of; requests are not among it."""

    seq: int
    at_s: float  # on the scheduler's clock, as all times below
    kind: str
    text: str


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """When the scheduler did what for one step; `forward_s` and `sample_s` are rank 0's."""

    plan_s: float
    planned_s: float
    sent_s: float
    received_s: float
    applied_s: float
    published_s: float
    forward_s: float
    sample_s: float


class StepSeen(msgspec.Struct, frozen=True, array_like=True):
    """One step of one group, as the console draws it and the trace tells it."""

    seq: int
    group_id: int
    step_id: int
    step_s: float  # from being sent, or from the result of the step before it, to its own result
    prefill: list[tuple[int, int]]  # slot, tokens
    decode_slots: bytes  # int32
    times: StepTimes


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One step on one rank, on the rank's clock."""

    seq: int
    group_id: int
    rank: int
    step_id: int
    began_s: float
    ended_s: float


class NodeSeen(msgspec.Struct, frozen=True, array_like=True):
    """A machine of the cluster that has work of ours."""

    node_id: str
    groups: list[int]  # that have a rank here
    ranks: int
    routers: int
    leaving: bool


class EngineLimits(msgspec.Struct, frozen=True, array_like=True):
    """What the figures are to be held against."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool


class View(msgspec.Struct, frozen=True, array_like=True):
    """All that the scheduler can tell an operator: what `/metrics`, the console and the trace are made of."""

    now_s: float
    status: ClusterStatus
    limits: EngineLimits
    figures: FigureSet
    last_minute: dict[str, Buckets]  # latencies of late, by name
    seq: int  # of the newest step, rank step or event here: ask for what comes after it
    nodes: list[NodeSeen]
    steps: list[StepSeen]
    rank_steps: list[RankStep]
    events: list[Event]


# Router replica -> scheduler
class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """First message of a connection."""

    node_id: str = ""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    request: GenerateRequest
    resumed: bool  # accepted once before: not refused for being one too many


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: str
    choice_index: int | None = None  # this one alone: its stop string came


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    call_id: int


class AskView(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """With `after` also the steps and events that came after it; steps are recorded while somebody asks for them."""

    call_id: int
    after: int | None
    traced: bool  # have the ranks report too


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """What was added to this router's figures since its last report."""

    figures: FigureSet


FromRouter = Open | Submit | Abort | AskStatus | AskView | Report


# Scheduler -> router replica
class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    now_s: float  # the scheduler's clock


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    request_id: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    request_id: str
    kind: str
    message: str
    param: str | None
    retry_after_s: float

    @classmethod
    def of(cls, request_id: str, refusal: RequestRefused) -> Refused:
        retry_after_s = refusal.retry_after_s if isinstance(refusal, QueueFull | Unavailable) else 0.0
        return cls(request_id, type(refusal).__name__, refusal.message, refusal.param, retry_after_s)

    def as_exception(self) -> RequestRefused:
        if self.kind == QueueFull.__name__:
            return QueueFull(self.message, self.retry_after_s)
        if self.kind == Unavailable.__name__:
            return Unavailable(self.message, self.retry_after_s)
        refusal = InvalidParameter(self.message, self.param)
        if self.kind == ContextLengthExceeded.__name__:
            refusal.code = ContextLengthExceeded.code
        return refusal


class StatusReply(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    call_id: int
    status: ClusterStatus


class ViewReply(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    call_id: int
    view: View


class NodeLeaves(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """The router's node is about to go: be ready for nothing new."""


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The service ends: what is still running will not be continued by anyone."""

    reason: str


ToRouter = Welcome | Accepted | Refused | StepDeltas | StatusReply | ViewReply | NodeLeaves | Farewell


# Rank -> scheduler
class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    group_id: int
    incarnation: str
    rank: int
    node_id: str = ""
    pool: PoolFile | None = None  # that ranks of other groups on its node can read
    kept: list[SlotKv] = []  # computed for the scheduler before this one


class Holds(msgspec.Struct, frozen=True, array_like=True, tag="holds"):
    """This rank can read the pool that it was told of, whatever becomes of its owner."""

    group_id: int
    incarnation: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """This rank cannot go on; the whole group is to be rebuilt."""

    error: str


class Timed(msgspec.Struct, frozen=True, array_like=True, tag="timed"):
    """When a traced step ran, on the rank's clock; every rank says so."""

    step_id: int
    began_s: float
    ended_s: float


FromRank = Hello | Holds | Done | Timed | Failed


# Scheduler -> rank
class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    plan: StepPlan
    traced: bool = False  # answer with Timed as well


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Stop stepping; the worker stays loaded and waits to be told where to go on."""


class Neighbour(msgspec.Struct, frozen=True, array_like=True, tag="neighbour"):
    """Hold the KV pool of another group's rank on this node, and answer with Holds."""

    group_id: int
    incarnation: str
    file: PoolFile


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Let go of the pool of that group, if it is held."""

    group_id: int


ToRank = Step | Neighbour | Forget | Leave

"""What travels on the channels of the cluster: between router replicas and the scheduler, and on to the ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter, QueueFull, RequestRefused, Unavailable
from orcaserve.engine.messages import GenerateRequest, StepDeltas, StepPlan, StepResult
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


# Router replica -> scheduler
class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """First message of a connection."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    request: GenerateRequest
    resumed: bool  # accepted once before: not refused for being one too many


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: str


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    call_id: int


FromRouter = Open | Submit | Abort | AskStatus


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


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The service ends: what is still running will not be continued by anyone."""

    reason: str


ToRouter = Welcome | Accepted | Refused | StepDeltas | StatusReply | Farewell


# Rank -> scheduler
class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    group_id: int
    incarnation: str
    rank: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """This rank cannot go on; the whole group is to be rebuilt."""

    error: str


FromRank = Hello | Done | Failed


# Scheduler -> rank
class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    plan: StepPlan


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Stop stepping; the worker stays loaded and waits to be told where to go on."""


ToRank = Step | Leave

"""What a drill does to a running service: it kills and stops its processes and takes its nodes away."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from orcaserve.loadtest.serving import processes_under

FaultKind = Literal[
    "worker_killed", "worker_stopped", "scheduler_killed", "router_killed", "client_closed", "node_lost"
]

_ROLES = {"worker": "ray::WorkerActor", "scheduler": "ray::SchedulerActor", "router": "ray::ServeReplica:"}
_SIGNALS: dict[FaultKind, tuple[str, signal.Signals]] = {
    "worker_killed": ("worker", signal.SIGKILL),
    "worker_stopped": ("worker", signal.SIGSTOP),
    "scheduler_killed": ("scheduler", signal.SIGKILL),
    "router_killed": ("router", signal.SIGKILL),
}
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class Injector:
    """Strikes the processes below `root_pid`, and nodes by `lose_node` where there are some to lose."""

    def __init__(self, root_pid: int, rng: random.Random, lose_node: Callable[[], None] | None = None) -> None:
        self._root_pid = root_pid
        self._rng = rng
        self._lose_node = lose_node

    def strike(self, kind: FaultKind) -> bool:
        """False when there is nobody to strike at the moment."""
        if kind == "node_lost":
            assert self._lose_node is not None
            self._lose_node()
            return True
        role, sig = _SIGNALS[kind]
        victims = self.pids(role)
        if not victims:
            return False
        try:
            os.kill(self._rng.choice(victims), sig)
        except ProcessLookupError:
            return False
        return True

    def pids(self, role: str) -> list[int]:
        """Of the workers, schedulers or routers that live, in order."""
        return sorted(pid for pid, line in processes_under(self._root_pid).items() if _ROLES[role] in line)


def schedule(kinds: Sequence[FaultKind], num_faults: int, rng: random.Random) -> list[FaultKind]:
    """As many of each kind as can be, shuffled."""
    order = [kinds[i % len(kinds)] for i in range(num_faults)]
    rng.shuffle(order)
    return order

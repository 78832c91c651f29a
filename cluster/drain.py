"""Emptying one node before it goes, from a process on that node: what a pod runs before it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orcaserve.cluster.ray_address import NAMESPACE, join_ray
from orcaserve.cluster.scheduler_actor import scheduler_actor_name

_POLL_S = 0.5
_HAND_OVER_S = 2.0  # what a group still runs then moves, and its processes end, before the time is up
_LAST_BYTES_S = 1.0  # what the engine has ended is still on its way to the client


def drain_this_node(ray_address: str, application: str, timeout_s: float, say: Callable[[str], None]) -> int:
    """`drain_node` with a Ray that runs here. Raises NoRay."""
    import ray

    join_ray(ray_address)
    try:
        return drain_node(ray.get_runtime_context().get_node_id(), application, timeout_s, say)
    finally:
        ray.shutdown()


def drain_node(node_id: str, application: str, timeout_s: float, say: Callable[[str], None]) -> int:
    """Ray places nothing new there, Serve moves its routers, groups move elsewhere and streams end.

    Returns how many groups and streams were left when the time was up.
    """
    import ray
    from ray.exceptions import RayError

    deadline_s = time.monotonic() + timeout_s
    say(f"draining node {node_id[:8]}")
    if refusal := _keep_new_work_away(node_id, timeout_s):
        say(f"Ray still places work there: {refusal}")
    left: Any = 0
    while True:
        try:
            scheduler: Any = ray.get_actor(scheduler_actor_name(application), NAMESPACE)
            to_finish_s = max(0.0, deadline_s - _HAND_OVER_S - time.monotonic())
            left = ray.get(scheduler.leave_node.remote(node_id, to_finish_s), timeout=10)
        except ValueError:
            say(f"no application {application!r} is served here")
            return 0
        except RayError as error:  # a new one is under way; it must be told again
            say(f"the scheduler does not answer: {type(error).__name__}")
        else:
            if not left:
                time.sleep(min(_LAST_BYTES_S, max(0.0, deadline_s - time.monotonic())))
                return 0
        if time.monotonic() > deadline_s:
            return left
        time.sleep(_POLL_S)


def _keep_new_work_away(node_id: str, timeout_s: float) -> str:
    """Tell Ray that this node will be gone; returns why it will not have it. `ray drain-node` does the same."""
    import ray
    from ray import _raylet
    from ray.core.generated import autoscaler_pb2

    raylet: Any = _raylet
    messages: Any = autoscaler_pb2
    client = raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = time.time_ns() // 10**6 + int(timeout_s * 1000)
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = client.drain_node(node_id, reason, "orcaserve drain", deadline_ms)
    return "" if accepted else refusal

"""What the console's page is told, four times a second: the scheduler's view in the page's words."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from orcaserve.cluster.figures import FIRST_TOKEN, INTER_TOKEN, quantile
from orcaserve.cluster.wire import GroupStatus, StepSeen, View
from orcaserve.engine.stats import GroupStats

MAX_STEPS = 240  # of one group in one message; the page shows no more
RATE_WINDOW_S = 2.0

_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class ConsoleState:
    """One for each onlooker: it remembers what rates need."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._tokens: deque[tuple[float, int, int]] = deque()  # when, generated, prompt

    def of(self, view: View, wall_s: float) -> dict[str, Any]:
        """The next message. `wall_s` is the time of day that belongs to the view."""
        stats = view.status.scheduler
        generated, prompted = self._rates(view)
        by_id = {group.group_id: group for group in stats.groups}
        steps: dict[int, list[StepSeen]] = {}
        for step in view.steps:
            steps.setdefault(step.group_id, []).append(step)
        return {
            "model": self._model_name,
            "ready": view.status.ready,
            "draining": view.status.draining,
            "totals": {
                "running": stats.running,
                "waiting": stats.waiting,
                "generation_tokens_per_s": generated,
                "prompt_tokens_per_s": prompted,
            },
            "latency_ms": {"ttft": _latency(FIRST_TOKEN, view), "itl": _latency(INTER_TOKEN, view)},
            "groups": [
                _group(group, by_id.get(group.group_id), steps.get(group.group_id, []), view)
                for group in sorted(view.status.groups, key=lambda group: group.group_id)
            ],
            "queue": [{"tenant": name, "waiting": count} for name, count in sorted(stats.waiting_by_tenant.items())],
            "routers": view.status.num_routers,
            "nodes": [
                {
                    "id": node.node_id[:8],
                    "state": "leaving" if node.leaving else "in service",
                    "groups": node.groups,
                    "ranks": node.ranks,
                    "routers": node.routers,
                }
                for node in view.nodes
            ],
            "events": [
                {"at_ms": round(1000 * (wall_s - view.now_s + event.at_s)), "kind": event.kind, "text": event.text}
                for event in view.events
            ],
        }

    def _rates(self, view: View) -> tuple[float, float]:
        stats, history = view.status.scheduler, self._tokens
        if history and stats.generation_tokens < history[-1][1]:
            history.clear()  # another scheduler, which counts from 0
        history.append((view.now_s, stats.generation_tokens, stats.prompt_tokens))
        while len(history) > 2 and history[1][0] <= view.now_s - RATE_WINDOW_S:
            history.popleft()
        (first_s, *first), (last_s, *last) = history[0], history[-1]
        if last_s <= first_s:
            return 0.0, 0.0
        generated, prompted = ((now - then) / (last_s - first_s) for then, now in zip(first, last, strict=True))
        return generated, prompted


def _latency(name: str, view: View) -> dict[str, float | None]:
    values = {p: quantile(name, view.last_minute[name], share) for p, share in _SHARES.items()}
    return {p: None if value is None else 1000 * value for p, value in values.items()}


def _group(group: GroupStatus, stats: GroupStats | None, steps: list[StepSeen], view: View) -> dict[str, Any]:
    blocks = {"total": group.num_kv_blocks, "used": 0, "cached": 0, "free": group.num_kv_blocks}
    if stats is not None:
        blank = stats.free_blocks - stats.cached_blocks
        blocks = {"total": stats.total_blocks, "used": stats.used_blocks, "cached": stats.cached_blocks, "free": blank}
    return {
        "id": group.group_id,
        "state": group.state,
        "phase": group.error if group.state == "dead" else group.phase,
        "nodes": sorted({node[:8] for node in group.node_ids}),
        "ranks": len(group.pids),
        "starts": group.num_starts,
        "max_num_seqs": view.limits.max_num_seqs,
        "token_budget": view.limits.max_num_batched_tokens,
        "running": 0 if stats is None else stats.running,
        "blocks": blocks,
        "steps": [
            {
                "id": step.step_id,
                "ms": 1000 * step.step_s,
                "prefill": step.prefill,
                "decode": np.frombuffer(step.decode_slots, np.int32).tolist(),
            }
            for step in steps[-MAX_STEPS:]
        ],
    }

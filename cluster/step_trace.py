"""A trace of steps for Chrome's and Perfetto's viewers: who did what when, across the scheduler and the ranks.

Rows: for each group the scheduler's work (plan, send, receive, publish) and the results' way back; for each rank its
steps, on rank 0 divided into forward and sample. Arrows lead from a plan to the ranks that carry it out.
Times of ranks on other machines are moved onto the scheduler's clock, see `_offset_s`.
"""

from __future__ import annotations

import math
from typing import Any

from orcaserve.cluster.wire import RankStep, StepSeen, View

SCHEDULER = 1  # the trace's process numbers; group g is GROUPS + g
GROUPS = 100
_RETURNS = 1000  # rows of the scheduler's process: group g, and _RETURNS + g for its results' way back


class StepTrace:
    """Collects views; one trace comes out."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], StepSeen] = {}
        self._rank_steps: list[RankStep] = []

    def add(self, view: View) -> None:
        """What came since the last one."""
        for step in view.steps:
            self._steps[step.group_id, step.step_id] = step
        self._rank_steps += view.rank_steps

    def chrome(self) -> dict[str, Any]:
        """The trace event format: complete events, flows and names; microseconds from the first plan on."""
        origin_s = min((step.times.plan_s for step in self._steps.values()), default=0.0)
        writer = _Writer(origin_s)
        for step in self._steps.values():
            _scheduler_events(writer, step)
        ranks: dict[tuple[int, int], list[RankStep]] = {}
        for rank_step in self._rank_steps:
            if (rank_step.group_id, rank_step.step_id) in self._steps:
                ranks.setdefault((rank_step.group_id, rank_step.rank), []).append(rank_step)
        offsets_s = {group_id: self._offset_s(group_id, ranks) for group_id, _ in ranks}
        for (group_id, rank), rank_steps in sorted(ranks.items()):
            offset_s = offsets_s[group_id]
            writer.name(GROUPS + group_id, f"group {group_id}", rank, f"rank {rank}")
            for rank_step in rank_steps:
                self._rank_events(writer, rank_step, offset_s)
        for group_id in sorted({step.group_id for step in self._steps.values()}):
            writer.name(SCHEDULER, "scheduler", group_id, f"group {group_id}")
            writer.name(SCHEDULER, "scheduler", _RETURNS + group_id, f"group {group_id}: result under way")
            self._ways_back(writer, group_id, ranks.get((group_id, 0), []), offsets_s.get(group_id, 0.0))
        return {"traceEvents": writer.events, "displayTimeUnit": "ms"}

    def _offset_s(self, group_id: int, ranks: dict[tuple[int, int], list[RankStep]]) -> float:
        """The clock of a group's node (its ranks share one) minus the scheduler's.

        No step begins before it was planned, no result comes before it is there: every step of rank 0 bounds the
        difference on both sides. On one machine there is one clock, and 0 lies within; else it is the middle (as NTP
        does).
        """
        low, high = -math.inf, math.inf
        for rank_step in ranks.get((group_id, 0), []):
            times = self._steps[group_id, rank_step.step_id].times
            high = min(high, rank_step.began_s - times.planned_s)
            low = max(low, rank_step.ended_s - times.received_s)
        return 0.0 if low <= 0.0 <= high else (low + high) / 2

    def _rank_events(self, writer: _Writer, rank_step: RankStep, offset_s: float) -> None:
        step = self._steps[rank_step.group_id, rank_step.step_id]
        pid, tid = GROUPS + rank_step.group_id, rank_step.rank
        began_s, ended_s = rank_step.began_s - offset_s, rank_step.ended_s - offset_s
        writer.slice(pid, tid, f"step {rank_step.step_id}", began_s, ended_s, _described(step))
        writer.arrow("f", pid, tid, rank_step.group_id, rank_step.step_id, began_s)
        if rank_step.rank == 0 and step.times.forward_s:
            # What the worker measured: forward first, sample last, both within the step.
            sample_s = max(began_s, ended_s - step.times.sample_s)
            forward_end_s = min(sample_s, began_s + step.times.forward_s)
            writer.slice(pid, tid, "forward", began_s, forward_end_s)
            writer.slice(pid, tid, "sample", sample_s, ended_s)
        else:
            writer.slice(pid, tid, "forward", began_s, ended_s)

    def _ways_back(self, writer: _Writer, group_id: int, rank_steps: list[RankStep], offset_s: float) -> None:
        last_s = -math.inf
        for rank_step in rank_steps:
            received_s = self._steps[group_id, rank_step.step_id].times.received_s
            began_s = max(last_s, rank_step.ended_s - offset_s)
            writer.slice(SCHEDULER, _RETURNS + group_id, f"result {rank_step.step_id}", began_s, received_s)
            last_s = received_s


def _scheduler_events(writer: _Writer, step: StepSeen) -> None:
    times, tid = step.times, step.group_id
    # All that the step-time model of the simulator needs to learn from a trace.
    decodes = memoryview(step.decode_slots).cast("i").tolist()
    whole = {"prefill": step.prefill, "decodes": decodes, "step_s": step.step_s}
    writer.slice(SCHEDULER, tid, "plan", times.plan_s, times.planned_s, {**_described(step), **whole})
    writer.slice(SCHEDULER, tid, "send", times.planned_s, times.sent_s)
    writer.arrow("s", SCHEDULER, tid, step.group_id, step.step_id, times.planned_s)
    writer.slice(SCHEDULER, tid, "receive", times.received_s, times.applied_s, {"step": step.step_id})
    writer.slice(SCHEDULER, tid, "publish", times.applied_s, times.published_s)


def _described(step: StepSeen) -> dict[str, Any]:
    return {
        "step": step.step_id,
        "prefill_tokens": sum(num_tokens for _, num_tokens in step.prefill),
        "prefill_slots": len(step.prefill),
        "decode_slots": len(step.decode_slots) // 4,
    }


class _Writer:
    """Trace events, in the order in which they are told."""

    def __init__(self, origin_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._origin_s = origin_s

    def _us(self, at_s: float) -> float:
        return round(1e6 * (at_s - self._origin_s), 3)

    def name(self, pid: int, process: str, tid: int, thread: str) -> None:
        self.events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})

    def slice(
        self, pid: int, tid: int, name: str, began_s: float, ended_s: float, args: dict[str, Any] | None = None
    ) -> None:
        took_us = round(1e6 * max(0.0, ended_s - began_s), 3)
        event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "step", "ts": self._us(began_s)}
        self.events.append({**event, "dur": took_us, **({"args": args} if args else {})})

    def arrow(self, end: str, pid: int, tid: int, group_id: int, step_id: int, at_s: float) -> None:
        event = {"ph": end, "pid": pid, "tid": tid, "name": "plan", "cat": "plan", "ts": self._us(at_s)}
        self.events.append({**event, "id": f"{group_id}.{step_id}", **({"bp": "e"} if end == "f" else {})})

"""Many steps at once are the same as one by one: the whole state, every token, and all that comes after."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler

TOKEN = 7


def config(**changes) -> SchedulerConfig:
    given = {"eos_token_ids": (), "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return SchedulerConfig(**{"max_model_len": 128, **given, "enable_prefix_caching": False, **changes})


def request(i: int, prompt: int, output: int, **fields) -> GenerateRequest:
    sampling = SamplingParams(output, seed=i, ignore_eos=fields.pop("ignore_eos", True))
    return GenerateRequest(str(i), tuple(range(3, 3 + prompt)), sampling, stream=i % 2, **fields)


class Side:
    """A scheduler with one group whose workers answer TOKEN; what came out is kept by request."""

    def __init__(self, given: SchedulerConfig, num_blocks: int) -> None:
        self.scheduler = Scheduler(given)
        self.scheduler.add_group(0, num_blocks)
        self.plans = []  # rows of each step in flight
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def plan(self, now_s: float) -> None:
        while (plan := self.scheduler.schedule(0, now_s)) is not None:
            self.plans.append((plan.step_id, len(plan.decode_slots) // 4 + sum(c.samples for c in plan.chunks)))

    def step(self, now_s: float) -> None:
        step_id, rows = self.plans.pop(0)
        self.take(self.scheduler.apply(0, StepResult(step_id, np.full(rows, TOKEN, np.int32).tobytes()), now_s))
        self.plan(now_s)

    def leap(self, ends_s: list[float]) -> None:
        rows = self.plans[0][1]
        ids, deltas = self.scheduler.advance(0, ends_s, TOKEN)
        self.plans = [(step_id, rows) for step_id in ids]
        self.take(deltas)

    def take(self, deltas) -> None:
        for delta in [d for stream in sorted(deltas) for d in deltas[stream]]:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason

    def state(self) -> dict:
        """Everything that later calls can depend on."""
        scheduler, group = self.scheduler, self.scheduler._groups[0]
        batch, pool = group.decodes, group.kv.pool

        def ids(requests) -> list[str]:
            return [r.request_id for r in requests]

        return {
            "requests": [
                (r.request_id, r.token_ids, r.blocks, r.slot, r.row, r.state, r.end_tick, r.num_computed, r.reported)
                for r in scheduler._ledger
            ],
            "batch": (batch.tick, [ids(bucket) for bucket in batch._buckets], batch._slots.tolist()),
            "pool": (pool._blank, pool._ref_counts),
            "flight": [(s.step_id, s.planned_s, s.num_tokens, len(s.chunks), ids(s.ends)) for s in group.in_flight],
            "decodes": [(d.slots, ids(d.rows), ids(d.filling)) for d in (s.decodes for s in group.in_flight)],
            "group": (group.tokens_in_flight, group.num_steps, group.step_s, group._progress_s, group.owed_tokens),
            "counters": (scheduler._counters, vars(scheduler._meter), scheduler.stats()),
            "queue": len(scheduler._queue),
            "out": (self.tokens, self.reasons, self.plans),
        }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_leap_is_its_steps_one_by_one(data) -> None:
    given = config(
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.sampled_from([5, 16, 64])),
        max_steps_in_flight=data.draw(st.integers(1, 3)),
        scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
    )
    num_blocks = data.draw(st.integers(24, 60))
    leaping, stepping = Side(given, num_blocks), Side(given, num_blocks)
    now_s, number = 0.0, 0
    for _ in range(data.draw(st.integers(3, 25))):
        for _ in range(data.draw(st.integers(0, 2))):
            sizes = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50))
            priority = data.draw(st.integers(0, 1))
            for side in (leaping, stepping):
                side.scheduler.add(request(number, *sizes, priority=priority), now_s)
            number += 1
        for side in (leaping, stepping):
            side.plan(now_s)
        quiet = leaping.scheduler.quiet_steps(0)
        assert quiet == stepping.scheduler.quiet_steps(0)
        if quiet and (not leaping.scheduler.num_waiting or leaping.scheduler.leaves_all(0, now_s)):
            gaps = data.draw(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=quiet))
            ends_s = (now_s + np.cumsum(gaps)).tolist()
            leaping.leap(ends_s)
            for end_s in ends_s:
                stepping.step(end_s)
            event("leaps")
        elif leaping.plans:
            ends_s = [now_s + 0.1]
            for side in (leaping, stepping):
                side.step(ends_s[0])
        else:
            continue
        now_s = ends_s[-1]
        leaping.scheduler.check_invariants()
        assert leaping.state() == stepping.state()
    while leaping.plans:
        now_s += 0.1
        for side in (leaping, stepping):
            side.step(now_s)
    assert leaping.state() == stepping.state()
    assert set(leaping.reasons.values()) <= {"length"}


def quiet_side(**changes) -> Side:
    side = Side(config(**changes), 40)
    side.scheduler.add(request(0, 6, 60), 0.0)
    side.plan(0.0)
    for now_s in (1.0, 2.0):
        side.step(now_s)
    return side


def test_a_leap_reaches_up_to_the_plan_that_ends_a_request() -> None:
    side = quiet_side(max_steps_in_flight=1)
    quiet = side.scheduler.quiet_steps(0)
    side.leap([3.0 + i for i in range(quiet)])
    assert len(side.tokens["0"]) == 2 + quiet
    assert side.scheduler.quiet_steps(0) == 0
    side.step(99.0)
    side.step(100.0)
    assert side.reasons == {"0": "length"}
    assert len(side.tokens["0"]) == 60


def test_memory_bounds_a_leap() -> None:
    side = Side(config(max_num_seqs=2), 12)
    for i in range(2):
        side.scheduler.add(request(i, 8, 40), 0.0)
    side.plan(0.0)
    for now_s in (1.0, 2.0, 3.0):
        side.step(now_s)
    free = side.scheduler.stats().groups[0].free_blocks
    assert 0 < side.scheduler.quiet_steps(0) <= free // 2 * 4
    while not side.scheduler.num_preemptions:
        now_s += 1.0
        side.step(now_s)
    assert side.scheduler.quiet_steps(0) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": True},
        {"num_speculative_tokens": 2},
        {"enable_chunked_prefill": False},
        {"scheduling_policy": "fair"},
        {"scheduling_policy": "deadline"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_steps_that_may_differ_are_not_foreseen(changes) -> None:
    assert quiet_side().scheduler.quiet_steps(0) > 0
    changes = {**changes, "max_num_batched_tokens": 128} if "enable_chunked_prefill" in changes else changes
    assert quiet_side(**changes).scheduler.quiet_steps(0) == 0


def test_a_request_that_may_stop_is_not_foreseen() -> None:
    side = Side(config(eos_token_ids=(2,)), 40)
    side.scheduler.add(request(0, 6, 60, ignore_eos=False), 0.0)
    side.plan(0.0)
    for now_s in (1.0, 2.0):
        side.step(now_s)
    assert side.scheduler.quiet_steps(0) == 0


def test_a_look_that_finds_something_to_start_leaves_no_trace() -> None:
    side = quiet_side()
    side.scheduler.add(request(1, 5, 5), 2.0)
    waiting = side.scheduler._ledger.find("1", 0)
    assert not side.scheduler.leaves_all(0, 2.0)
    assert waiting.num_passes == 0
    assert side.scheduler.num_waiting == 1
    side.scheduler.drain_group(0)
    assert side.scheduler.leaves_all(0, 2.0)


def test_a_look_leaves_requests_to_a_group_that_has_them_sooner() -> None:
    side = quiet_side()
    side.scheduler.add_group(1, 40)
    side.scheduler.add(request(1, 5, 5), 2.0)
    assert side.scheduler.leaves_all(0, 2.0)
    assert side.scheduler._ledger.find("1", 0).num_passes == 1
    assert side.scheduler.schedule(1, 2.0).new_slots

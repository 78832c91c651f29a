"""The simulation that leaps over steps has the times of the one that goes through each."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import Arrivals, ClosedLoop, OpenLoop, constant, poisson
from orcaserve.loadtest.leaping import LeapingSimulation
from orcaserve.loadtest.model_shape import LLAMA_3_8B, LLAMA_3_70B
from orcaserve.loadtest.outcome import Outcome
from orcaserve.loadtest.simulate import Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import CPU, H100, StepTime
from orcaserve.loadtest.workload import LoadRequest

FAST, SLOW = StepTime(LLAMA_3_8B, H100, 1), StepTime(LLAMA_3_70B, CPU, 1)


class CountingScheduler(Scheduler):
    num_applied = num_advanced = 0

    def apply(self, group_id, result, now_s):
        self.num_applied += 1
        return super().apply(group_id, result, now_s)

    def advance(self, group_id, ends_s, token_id):
        self.num_advanced += len(ends_s)
        return super().advance(group_id, ends_s, token_id)


def both(requests, arrivals: Arrivals, groups=1, slots=4, budget=64, blocks=200, ahead=1, step_time=FAST):
    """(gone through, leapt over, the scheduler that leapt)"""
    outcomes, schedulers = [], []
    for kind in (Simulation, LeapingSimulation):
        config = SchedulerConfig(
            max_model_len=1024,
            eos_token_ids=(),
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_steps_in_flight=ahead + 1,
            enable_prefix_caching=False,
            watermark=0.05,
        )
        scheduler = CountingScheduler(config)
        for group in range(groups):
            scheduler.add_group(group, blocks)
        workers = {group: VirtualWorkers(step_time, slots) for group in range(groups)}
        outcomes.append(kind(scheduler, workers, requests, arrivals, steps_ahead=ahead).run())
        scheduler.check_invariants()
        schedulers.append(scheduler)
    return *outcomes, schedulers[1]


def assert_same(one: Outcome, other: Outcome) -> None:
    for name in ("arrival_s", "first_s", "end_s", "queue_s", "output_tokens", "ends", "gap_counts"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name
    for name in ("finish_reasons", "refused", "duration_s", "num_steps", "computed_tokens", "padding_tokens"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.sampled_tokens == other.sampled_tokens
    assert one.busy_s == pytest.approx(other.busy_s, rel=1e-9)  # summed in another order


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 120)), min_size=1, max_size=30),
    groups=st.sampled_from([1, 2, 3, 5]),
    slots=st.integers(1, 6),
    budget=st.integers(8, 128),
    blocks=st.sampled_from([21, 30, 60, 400]),
    ahead=st.integers(0, 2),
    users=st.integers(0, 9),
    rate=st.sampled_from([0.5, 20.0, 200.0, 2000.0, float("inf")]),
    seed=st.integers(0, 3),
)
def test_all_times_are_the_same(sizes, groups, slots, budget, blocks, ahead, users, rate, seed) -> None:
    requests = [LoadRequest(i, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    if users:
        arrivals: Arrivals = ClosedLoop(users, think_s=seed * 0.01)
    elif seed and rate < float("inf"):
        arrivals = poisson(len(requests), rate, np.random.default_rng(seed))
    else:
        arrivals = constant(len(requests), rate)
    stepped, leapt, scheduler = both(requests, arrivals, groups, slots, budget, blocks, ahead)
    assert_same(stepped, leapt)
    event(f"leapt: {scheduler.num_advanced > 0}, preempted: {scheduler.num_preemptions > 0}")


@pytest.mark.parametrize("groups", [8, 70])  # dispatch looks at a window of 64
@pytest.mark.parametrize("load", [0.3, 0.9, 3.0])
def test_a_fleet_under_light_and_heavy_load(groups: int, load: float) -> None:
    rng = np.random.default_rng(0)
    n = 12 * groups
    requests = [LoadRequest(i, int(rng.integers(10, 300)), int(rng.integers(2, 150))) for i in range(n)]
    stepped, leapt, scheduler = both(requests, poisson(n, load * 6 * groups, rng), groups, slots=8, budget=256)
    assert_same(stepped, leapt)
    assert scheduler.num_advanced + scheduler.num_applied == stepped.num_steps


def test_slow_steps_and_long_lags_are_no_reason_to_call_a_group_stuck() -> None:
    requests = [LoadRequest(i, 20, 200) for i in range(12)]
    stepped, leapt, _ = both(requests, constant(12, 0.7), groups=3)
    assert_same(stepped, leapt)
    few = requests[:6]
    stepped, leapt, scheduler = both(few, constant(6, 0.01), groups=2, step_time=SLOW)
    assert_same(stepped, leapt)
    assert not scheduler.num_advanced  # steps of half a second and more


def test_requests_at_the_same_moment() -> None:
    requests = [LoadRequest(i, 16, 64) for i in range(24)]
    stepped, leapt, scheduler = both(requests, OpenLoop(np.repeat([0.0, 0.1, 0.1, 0.2], 6)), groups=4, slots=3)
    assert_same(stepped, leapt)
    assert scheduler.num_advanced


def test_most_steps_are_leapt_over() -> None:
    requests = [LoadRequest(i, 50, 400) for i in range(40)]
    stepped, _, scheduler = both(requests, constant(40, 10.0), groups=4, slots=16, blocks=2000)
    assert scheduler.num_applied < stepped.num_steps / 4


def test_nobody_can_watch_steps_that_are_not_gone_through() -> None:
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, eos_token_ids=(), enable_prefix_caching=False))
    scheduler.add_group(0, 10)
    simulation = LeapingSimulation(scheduler, {0: VirtualWorkers(FAST, 4)}, [LoadRequest(0, 5, 5)], constant(1, 1.0))
    simulation.every(1.0, lambda now_s: None)
    with pytest.raises(AssertionError, match="lag behind"):
        simulation.run()

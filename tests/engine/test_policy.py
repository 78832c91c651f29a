"""Who is next, and how long anyone can be made to wait."""

from __future__ import annotations

from collections import Counter

import pytest
from harness import NO_EOS, Harness
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.engine.policy import IMPLIED_DEADLINE_S, OUTPUT_WEIGHT, PRIORITY_STEP_S


def start_order(harness: Harness) -> list[str]:
    """Requests by their first start; the harness uses a request's number as its seed."""
    seeds = [new.sampling.seed for _, plan in harness.log for new in plan.new_slots]
    return [f"r{seed}" for seed in dict.fromkeys(seeds)]


def test_fcfs_keeps_the_order_of_arrival_whatever_the_lengths() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=20, model=NO_EOS)
    for i in range(10):
        harness.add([5] * (3 + 31 * (i % 3 == 0)), 5)
    harness.run()
    assert start_order(harness) == [f"r{i}" for i in range(10)]


def test_lower_priority_values_go_first_and_equal_ones_by_arrival() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="priority", model=NO_EOS)
    for priority in (2, 0, 1, 0, -3, 2):
        harness.add([5, 6, 7], 3, priority=priority)
    harness.run()
    assert start_order(harness) == ["r4", "r1", "r3", "r2", "r0", "r5"]


def test_priority_starves_nobody() -> None:
    """A request of priority 1 is overtaken only by those of priority 0 that arrive within one step after it."""
    harness = Harness(max_num_seqs=1, scheduling_policy="priority", model=NO_EOS)
    low = harness.add([5, 6, 7], 3, priority=1)
    while low not in start_order(harness):
        assert harness.now < PRIORITY_STEP_S + 5.0, "starved"
        if harness.scheduler.stats().waiting < 2:
            harness.add([5, 6, 7], 3, priority=0)
        harness.now += 0.5
        harness.schedule()
        harness.finish_step()
    assert harness.now >= PRIORITY_STEP_S, "until then the others do come first"


def test_fair_shares_are_equal_however_much_one_tenant_asks_for() -> None:
    harness = Harness(max_num_seqs=2, scheduling_policy="fair", model=NO_EOS)
    for i in range(60):
        harness.add([5 + i % 40] * 8, 8, tenant="greedy")
    for i in range(20):
        harness.add([5 + i] * 8, 8, tenant="modest")
    while harness.scheduler.stats().waiting_by_tenant.get("modest"):
        harness.round()
    served = Counter(harness.requests[d.request_id].tenant for d in harness.deltas)
    assert served["greedy"] == pytest.approx(served["modest"], rel=0.25)
    harness.run()


def test_fair_shares_follow_the_weights() -> None:
    harness = Harness(max_num_seqs=2, scheduling_policy="fair", tenant_weights={"gold": 3.0}, model=NO_EOS)
    for i in range(60):
        for tenant in ("gold", "iron"):
            harness.add([5 + i % 40] * 8, 8, tenant=tenant)
    while harness.scheduler.stats().waiting_by_tenant.get("gold"):
        harness.round()
    served = Counter(harness.requests[d.request_id].tenant for d in harness.deltas)
    assert served["gold"] / served["iron"] == pytest.approx(3.0, rel=0.25)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=20, max_size=20),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=20, max_size=20),
)
def test_fair_service_of_two_busy_tenants_stays_within_the_stated_bound(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    harness = Harness(max_num_seqs=4, scheduling_policy="fair", enable_prefix_caching=False, model=NO_EOS)
    for (len_a, out_a), (len_b, out_b) in zip(a, b, strict=True):
        harness.add([5] * len_a, out_a, tenant="a")
        harness.add([6] * len_b, out_b, tenant="b")
    bound = 2 * max(40, OUTPUT_WEIGHT * 4 * 12)
    while len(harness.scheduler.stats().waiting_by_tenant) == 2:
        harness.round()
        service: Counter[str] = Counter()
        for delta in harness.deltas:
            service[harness.requests[delta.request_id].tenant] += int(OUTPUT_WEIGHT) * len(delta.token_ids)
        for request_id in start_order(harness):
            request = harness.requests[request_id]
            service[request.tenant] += len(request.prompt_token_ids)
        assert abs(service["a"] - service["b"]) <= bound
    harness.run()


def test_idleness_is_not_saved_up() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="fair", model=NO_EOS)
    for _ in range(20):
        harness.add([5] * 8, 8, tenant="steady")
    for _ in range(80):
        harness.round()
    for _ in range(10):
        harness.add([6] * 8, 8, tenant="late")
    for _ in range(60):
        harness.round()
    recent = Counter(harness.requests[d.request_id].tenant for d in harness.deltas[-50:])
    assert recent["steady"] > 15, "the newcomer starts level, it has not earned what it did not use"
    harness.run()


def test_the_earliest_deadline_goes_first() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="deadline", model=NO_EOS)
    for deadline in (30.0, 10.0, None, 20.0, IMPLIED_DEADLINE_S + 5.0):
        harness.add([5, 6, 7], 3, deadline_s=deadline)
    harness.run()
    assert start_order(harness) == ["r1", "r3", "r0", "r2", "r4"]


def test_a_hopeless_deadline_goes_last_and_one_that_has_passed_costs_nothing() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="deadline", model=NO_EOS)
    harness.add([5] * 30, 10)
    for _ in range(3):  # a step takes 0.3 s
        harness.schedule()
        harness.now += 0.3
        harness.finish_step()
    now = harness.now
    hopeless = harness.add([6] * 200, 4, deadline_s=now + 0.2)
    good = harness.add([7] * 4, 4, deadline_s=now + 20.0)
    for _ in range(20):
        harness.round()
    assert start_order(harness)[1] == good
    harness.run()
    assert harness.reason(good) == "length"
    assert harness.reason(hopeless) in ("length", "timeout")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_a_queue_forgets_what_was_aborted(policy: str) -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy=policy, model=NO_EOS)
    kept = []
    for i in range(600):
        request = harness.add([5, 6, 7 + i % 9], 3, tenant=f"t{i % 5}", deadline_s=1000.0 + i)
        if i % 100:
            harness.scheduler.abort(request)
        else:
            kept.append(request)
    stats = harness.scheduler.stats()
    assert (stats.waiting, stats.waiting_tokens) == (6, 18)
    harness.run()
    assert sorted(start_order(harness)) == sorted(kept)

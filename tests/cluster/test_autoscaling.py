"""The scaling policy, on a clock of its own."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orcaserve.cluster.autoscaling import Autoscaler, Load, ScalingRules, groups_needed

RULES = ScalingRules(min_groups=0, max_groups=4, upscale_delay_s=5, downscale_delay_s=30, to_zero_delay_s=60)


def load(now_s: float, num_groups: int, running: int = 0, waiting: int = 0, **fields: float) -> Load:
    return Load(
        now_s=now_s,
        num_groups=num_groups,
        num_ready=num_groups,
        running=running,
        waiting=waiting,
        waiting_tokens=int(fields.pop("waiting_tokens", 100 * waiting)),
        slots_per_group=10,
        **fields,  # type: ignore[arg-type]
    )


def play(scaler: Autoscaler, demands: list[int], start: int = 0, begin_s: float = 0.0) -> list[int]:
    """One observation a second; groups are there as soon as they are wanted. Returns the number after each."""
    groups, seen = start, []
    for second, demand in enumerate(demands):
        room = groups * 10
        groups = scaler.decide(load(begin_s + second, groups, min(demand, room), max(0, demand - room)))
        seen.append(groups)
    return seen


def test_case_30_no_load_goes_to_zero_after_the_delay_and_not_before() -> None:
    seen = play(Autoscaler(RULES), [0] * 100, start=2)
    assert seen[29] == 2
    assert 0 not in seen[:60]
    assert seen[-1] == 0
    assert seen == sorted(seen, reverse=True)


def test_case_30_one_queued_request_wakes_a_group_at_once() -> None:
    assert Autoscaler(RULES).decide(load(0, 0, waiting=1)) == 1


def test_case_30_nothing_asked_nothing_started() -> None:
    assert set(play(Autoscaler(RULES), [0] * 300)) == {0}


def test_case_30_a_burst_makes_one_step_up_and_no_flapping() -> None:
    seen = play(Autoscaler(RULES), [20] * 40 + [0] * 20 + [20] * 40)
    ups = [b for a, b in pairwise([0, *seen]) if b > a]
    assert len(ups) == 1
    assert min(seen) == max(seen)


def test_a_spike_shorter_than_the_delay_starts_nothing() -> None:
    assert set(play(Autoscaler(RULES), [5] * 20 + [40] * 4 + [5] * 20, start=1)) == {1}


def test_demand_that_stays_is_met() -> None:
    seen = play(Autoscaler(RULES), [5] * 20 + [30] * 20, start=1)
    assert seen[-1] == 4
    assert seen[20:24] == [1] * 4


def test_a_long_queue_counts_against_the_target_for_the_first_token() -> None:
    few = load(0, 1, running=2, waiting=2, waiting_tokens=9000, tokens_per_s=1000.0)
    assert groups_needed(few, RULES) == 5  # 9,000 tokens at 1,000 a second and group, within 2 s
    assert groups_needed(load(0, 1, running=2, waiting=2, waiting_tokens=500, tokens_per_s=1000.0), RULES) == 1


def test_groups_that_start_at_once_need_no_look_ahead() -> None:
    rules = ScalingRules(min_groups=1, max_groups=4, upscale_delay_s=0, lookahead_s=0)
    assert play(Autoscaler(rules), [5, 15, 25, 35], start=1) == [1, 2, 3, 4]


def test_memory_counts_too() -> None:
    assert groups_needed(load(0, 2, running=4, used_kv=1.9), RULES) == 3


def test_a_rising_demand_is_met_ahead() -> None:
    steady = play(Autoscaler(RULES), [8] * 40, start=1)
    rising = play(Autoscaler(RULES), [*range(1, 9), *[8] * 2], start=1)
    still_rising = play(Autoscaler(RULES), [n // 4 for n in range(34)], start=1)
    assert steady[-1] == rising[-1] == 1
    assert still_rising[-1] == 2


@given(st.lists(st.integers(0, 200), min_size=1, max_size=200), st.integers(0, 2), st.integers(2, 5))
def test_always_within_the_limits(demands: list[int], low: int, high: int) -> None:
    rules = ScalingRules(min_groups=low, max_groups=high, upscale_delay_s=3, downscale_delay_s=10, to_zero_delay_s=20)
    seen = play(Autoscaler(rules), demands, start=low)
    assert all(low <= groups <= high for groups in seen)


@given(st.lists(st.integers(0, 100), min_size=20, max_size=200))
def test_changes_of_direction_keep_their_distance(demands: list[int]) -> None:
    seen = play(Autoscaler(RULES), demands, start=1)
    last_up = -1_000
    for second, (before, after) in enumerate(pairwise([1, *seen])):
        if after > before:
            last_up = second
        elif after < before:
            assert second - last_up >= RULES.downscale_delay_s - 1

"""Requests that go on from what they have, and groups that come, drain and are lost."""

from __future__ import annotations

import pytest
from harness import NO_EOS, Harness, prompt

from orcaserve.engine.errors import InvalidParameter, RequestRefused


def test_a_resumed_request_counts_what_it_has_and_emits_only_what_is_new() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(9), 10)
    harness.run()
    text = harness.text("r0")
    again = Harness(model=NO_EOS)
    again.add(prompt(9), 10, output_token_ids=tuple(text[:4]))
    again.run()
    assert again.text("r0") == text[4:]
    assert again.reason("r0") == "length"
    done = again.add(prompt(9), 10, output_token_ids=tuple(text), sampling={"seed": 0})
    again.run()
    assert (again.text(done), again.reason(done)) == ([], "length")
    with pytest.raises(InvalidParameter, match="n must be 1"):
        again.add(prompt(9), 10, output_token_ids=(5,), n=2)


def test_a_request_sent_again_by_its_router_starts_anew_from_what_the_client_has() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(9), 12)
    for _ in range(4):
        harness.round()
    seen = harness.text("r0")[:2]
    harness.deltas = [d for d in harness.deltas if d.request_id != "r0"]
    harness.add(prompt(9), 12, request_id="r0", output_token_ids=tuple(seen), sampling={"seed": 0})
    harness.run()
    assert seen + harness.text("r0") == harness.solo("r0")


def test_requests_of_a_lost_group_go_on_elsewhere_without_a_lost_or_repeated_token() -> None:
    harness = Harness(num_groups=2, model=NO_EOS)
    for i in range(6):
        harness.add(prompt(20, i), 30)
    for _ in range(10):
        harness.round()
    harness.schedule(1)
    harness.lose_group(1)
    harness.run()
    harness.assert_solo()
    assert harness.scheduler.stats().num_migrations > 0


def test_streams_of_a_lost_group_go_on_shortest_first_and_before_those_that_came_later() -> None:
    harness = Harness(model=NO_EOS, max_num_batched_tokens=16, long_prefill_token_threshold=16)
    for seed, length in enumerate((30, 10, 20)):
        harness.add(prompt(length, seed), 30)
    for _ in range(10):
        harness.round()
    harness.add(prompt(5, 9), 30)  # had not begun
    harness.lose_group(0)
    harness.add_group(0, 64)
    before = len(harness.deltas)
    harness.run()
    harness.assert_solo()
    order = list(dict.fromkeys(delta.request_id for delta in harness.deltas[before:]))
    assert order == ["r1", "r2", "r0", "r3"]


def test_a_late_result_of_a_lost_group_is_dropped() -> None:
    harness = Harness(num_groups=1, model=NO_EOS)
    harness.add(prompt(6), 5)
    harness.schedule()
    late = harness.work()
    harness.lose_group(0)
    harness.add_group(0, 64)
    assert harness.scheduler.apply(0, late, 0.0) == {}
    harness.schedule()
    assert harness.scheduler.apply(0, late, 0.0) == {}
    harness.run()
    harness.assert_solo()


def test_a_request_that_keeps_killing_groups_without_progress_is_ended() -> None:
    harness = Harness(num_groups=0)
    harness.add(prompt(6), 5)
    for group in range(2):
        assert harness.reason("r0") is None
        harness.add_group(group, 16)
        harness.schedule(group)
        harness.lose_group(group)
    assert harness.reason("r0") == "error"
    assert "2 groups were lost" in harness.deltas[-1].error
    with pytest.raises(RequestRefused, match="2 groups were lost"):
        harness.add(prompt(6), 5, num_group_losses=2)


def test_a_request_that_gets_on_between_two_losses_is_not_to_blame() -> None:
    harness = Harness(num_groups=0, model=NO_EOS)
    harness.add(prompt(6), 12)
    for group in range(6):
        harness.add_group(group, 16)
        harness.round()
        harness.round()
        harness.lose_group(group)
    harness.add_group(9, 16)
    harness.run()
    harness.assert_solo()


def test_a_draining_group_finishes_what_it_runs_and_takes_nothing_new() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(6), 12)
    harness.round()
    harness.scheduler.drain_group(0)
    harness.add(prompt(7), 5)
    while harness.round():
        pass
    assert harness.reason("r0") == "length"
    assert harness.text("r1") == []
    assert not harness.scheduler.has_work(0)
    harness.lose_group(0)
    harness.add_group(1, 16)
    harness.run()
    harness.assert_solo()


def test_a_group_may_be_taken_away_twice() -> None:
    harness = Harness()
    harness.lose_group(0)
    harness.scheduler.drain_group(0)
    assert harness.scheduler.remove_group(0, 0.0) == {}
    harness.add_group(1, 8)
    with pytest.raises(ValueError, match="group 1 is here already"):
        harness.scheduler.add_group(1, 8)


def test_nothing_is_lost_while_there_is_no_group() -> None:
    harness = Harness(num_groups=0)
    for i in range(20):
        harness.add(prompt(10, i))
    harness.add_group(0, 64)
    harness.run()
    harness.assert_solo()


def test_what_no_group_can_hold_any_more_ends_instead_of_blocking_the_queue() -> None:
    harness = Harness(num_groups=0)
    big = harness.add(prompt(100), 5)
    harness.add(prompt(10), 5)
    harness.add_group(0, 8)
    harness.run()
    assert harness.reason(big) == "error"
    assert "100 tokens do not fit" in harness.deltas[0].error
    assert harness.text("r1") == harness.solo("r1")

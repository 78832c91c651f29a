"""Requests that go on from what they have, and groups that come, drain and are lost."""

from __future__ import annotations

import pytest
from harness import NO_EOS, Harness, prompt

from orcaserve.engine.errors import InvalidParameter, RequestRefused
from orcaserve.engine.prefix import PrefixKeys, root_key


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


def test_streams_take_their_kv_along_where_the_lost_pool_can_be_read() -> None:
    """One in the middle of its prompt, one that decodes; neither computes again what the lost group had computed."""
    harness = Harness(num_groups=1, model=NO_EOS, long_prefill_token_threshold=8)
    harness.add(prompt(9, 1), 30)
    for _ in range(5):
        harness.round()
    harness.add(prompt(45, 2), 10)
    for _ in range(3):
        harness.round()
    harness.add_group(1, 64)
    harness.share_pools()
    running = {request.request_id: request for request in harness.scheduler._groups[0].running}
    assert not running["r1"].reported
    known = {name: request.num_with_kv for name, request in running.items()}
    assert known["r0"] == running["r0"].num_tokens - 1
    harness.lose_group(0)
    assert harness.scheduler.needs_pool(0)
    plan = harness.schedule(1)
    assert plan is not None
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(known["r0"], 1), (known["r1"], 8)]
    assert {group for group, _, _ in plan.block_imports} == {0}
    assert harness.scheduler.needs_pool(0)  # the step may be lost too
    harness.finish_step(1)
    assert not harness.scheduler.needs_pool(0)
    harness.run()
    harness.assert_solo()


def test_steps_in_flight_count_for_nothing_when_their_group_is_lost() -> None:
    harness = Harness(num_groups=2, model=NO_EOS, max_steps_in_flight=3)
    harness.share_pools()
    harness.add(prompt(9), 30)
    harness.schedule(0)
    harness.schedule(0)
    harness.schedule(0)
    harness.lose_group(0)
    assert not harness.scheduler.needs_pool(0)
    harness.run()
    harness.assert_solo()


def stream_on_one_of_three() -> tuple[Harness, int, int, int]:
    """A stream under way, the group that runs it, and two that can read its pool."""
    harness = Harness(num_groups=3, model=NO_EOS, max_group_losses=3)
    harness.share_pools()
    harness.add(prompt(21), 30)
    for _ in range(8):
        harness.round()
    (owner,) = (group for group, state in harness.scheduler._groups.items() if state.running)
    return harness, owner, *sorted({0, 1, 2} - {owner})


def test_a_group_that_is_lost_before_it_copied_leaves_the_first_loss_to_the_next_group() -> None:
    harness, owner, second, third = stream_on_one_of_three()
    computed = harness.workers[owner].num_computed_tokens
    harness.lose_group(owner)
    plan = harness.schedule(second)
    assert plan is not None
    assert plan.block_imports
    harness.lose_group(second)
    plan = harness.schedule(third)
    assert plan is not None
    assert {group for group, _, _ in plan.block_imports} == {owner}
    harness.run()
    harness.assert_solo()
    assert sum(worker.num_computed_tokens for worker in harness.workers.values()) + computed == 21 + 29


def test_what_a_forgotten_pool_held_is_computed_again() -> None:
    harness, owner, second, _ = stream_on_one_of_three()
    harness.lose_group(owner)
    harness.scheduler.forget_pool(owner)
    assert not harness.scheduler.needs_pool(owner)
    plan = harness.schedule(second)
    assert plan is not None
    assert not plan.block_imports
    assert plan.chunks[0].start == 0
    harness.run()
    harness.assert_solo()


def test_a_group_that_cannot_read_the_pool_leaves_the_stream_to_one_that_can() -> None:
    harness, owner, second, third = stream_on_one_of_three()
    harness.scheduler._groups[second].readable.clear()
    harness.lose_group(owner)
    assert harness.schedule(second) is None
    plan = harness.schedule(third)
    assert plan is not None
    assert plan.block_imports
    harness.run()
    harness.assert_solo()


def test_a_drained_group_hands_its_kv_over_too() -> None:
    harness = Harness(num_groups=2, model=NO_EOS)
    harness.share_pools()
    for seed in range(4):
        harness.add(prompt(13, seed), 40)
    for _ in range(8):
        harness.round()
    harness.scheduler.drain_group(0)
    before = harness.workers[1].num_computed_tokens
    owed = len(harness.scheduler._groups[0].running)
    assert owed
    harness.lose_group(0)
    harness.schedule(1)
    harness.finish_step(1)
    assert harness.workers[1].num_computed_tokens - before <= owed + 4
    assert harness.scheduler.stats().num_imported_blocks > 0
    harness.run()
    harness.assert_solo()


def test_a_new_scheduler_finds_what_its_workers_have_computed() -> None:
    """A decoding stream and a prompt half-way: whole blocks of both are found, for the same tenant and salt alone."""
    harness = Harness(model=NO_EOS, long_prefill_token_threshold=8)
    harness.add(prompt(9, 1), 30, tenant="a")
    for _ in range(5):
        harness.round()
    harness.add(prompt(45, 2), 10, cache_salt="s")
    for _ in range(3):
        harness.round()
    known = {request.request_id: request.num_with_kv for request in harness.scheduler._groups[0].running}
    seen = tuple(harness.text("r0"))
    assert known == {"r0": 8 + len(seen), "r1": 16}
    harness.replace_scheduler()
    harness.add(prompt(9, 1), 30, tenant="a", request_id="r0", output_token_ids=seen, sampling={"seed": 0})
    harness.add(prompt(45, 2), 10, cache_salt="s", request_id="r1", sampling={"seed": 1})
    stranger = harness.add(prompt(45, 2), 10)
    plan = harness.schedule()
    assert plan is not None
    assert [chunk.start for chunk in plan.chunks] == [(8 + len(seen)) // 4 * 4, 16, 0]
    harness.finish_step()
    harness.run()
    assert [harness.text(name) for name in ("r0", "r1", stranger)] == [harness.solo(n) for n in ("r0", "r1", stranger)]


def test_what_streams_share_is_evicted_after_what_follows_it_under_a_new_scheduler_too() -> None:
    harness = Harness(num_blocks=20, model=NO_EOS)
    for last in (3, 4):
        harness.add([*prompt(8), *[last] * 8], 20)
        for _ in range(3):
            harness.round()
    harness.replace_scheduler()
    pool = harness.scheduler._groups[0].kv.pool
    shared = [pool.find(key) for key in PrefixKeys(root_key("", ""), 4).up_to(2, prompt(8))]
    given = [pool.allocate() for _ in range(pool.num_free)]
    assert given[-2:] == shared[::-1]


def test_without_a_prefix_cache_a_new_scheduler_begins_with_empty_pools() -> None:
    harness = Harness(model=NO_EOS, enable_prefix_caching=False)
    harness.add(prompt(20), 30)
    for _ in range(5):
        harness.round()
    harness.replace_scheduler()
    assert harness.scheduler.stats().groups[0].cached_blocks == 0

"""Which group gets a request."""

from __future__ import annotations

from harness import NO_EOS, Harness, prompt
from hypothesis import given
from hypothesis import strategies as st

from orcaserve.engine.dispatch import GroupLoad, choose_group

loads = st.lists(
    st.builds(GroupLoad, st.integers(0, 99), st.booleans(), st.integers(0, 50), st.integers(0, 500)),
    max_size=8,
    unique_by=lambda load: load.group_id,
)


def test_the_prefix_is_weighed_against_the_work_ahead() -> None:
    warm = GroupLoad(1, True, 900, 500)
    cold = GroupLoad(2, True, 0, 0)
    assert choose_group(1000, [warm, cold], asking=2) == 1
    assert choose_group(1000, [warm._replace(work_ahead_tokens=1000), cold], asking=2) == 2
    assert choose_group(1000, [warm._replace(can_start=False), cold], asking=2) == 2
    assert choose_group(1000, [cold._replace(can_start=False)], asking=2) is None


def test_a_tie_goes_to_the_group_that_asks() -> None:
    same = [GroupLoad(i, True, 0, 5) for i in range(4)]
    assert [choose_group(10, same, asking=i) for i in range(4)] == [0, 1, 2, 3]
    assert choose_group(10, same, asking=9) == 0


@given(st.integers(50, 1000), loads, st.integers(0, 99))
def test_no_group_would_be_sooner_than_the_chosen_one(num_tokens: int, groups: list[GroupLoad], asking: int) -> None:
    chosen = choose_group(num_tokens, groups, asking)
    able = {load.group_id: load.work_ahead_tokens - load.num_found_tokens for load in groups if load.can_start}
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert able[chosen] == min(able.values())


def groups_of(harness: Harness) -> dict[int, int]:
    """Seed of each request -> the group that started it first."""
    placed: dict[int, int] = {}
    for group, plan in harness.log:
        for new in plan.new_slots:
            placed.setdefault(new.sampling.seed, group)
    return placed


def test_a_conversation_returns_to_the_group_that_holds_it() -> None:
    harness = Harness(num_groups=4, num_blocks=200, model=NO_EOS)
    for user in range(4):
        harness.add(prompt(60, user), 4)
    harness.run()
    homes = groups_of(harness)
    assert len(set(homes.values())) == 4, "the first turns spread out"
    for user in (2, 0, 3, 1):
        turn = harness.add([*prompt(60, user), *harness.text(f"r{user}"), 9, 9, 9], 4)
        harness.run()
        assert groups_of(harness)[int(turn[1:])] == homes[user]
        assert harness.first_delta(turn).num_cached_tokens == 60
    harness.assert_solo()


def test_32_groups_share_one_queue_evenly() -> None:
    harness = Harness(num_groups=32, max_num_seqs=4, model=NO_EOS)
    for i in range(256):
        harness.add(prompt(8, i), 6)
    harness.run()
    harness.assert_solo()
    per_group = [list(groups_of(harness).values()).count(group) for group in range(32)]
    assert min(per_group) >= 4
    assert max(per_group) <= 16


def test_a_ready_group_does_not_idle_while_others_are_full() -> None:
    harness = Harness(num_groups=2, max_num_seqs=1, num_blocks=200, model=NO_EOS)
    shared = prompt(60, 0)
    harness.add(shared, 30)
    harness.round()
    while not harness.text("r0"):
        harness.round()
    rest = [harness.add([*shared, i + 3], 30) for i in range(2)]
    harness.round()
    assert harness.scheduler.stats().running == 2, "the other group holds nothing of it and takes it all the same"
    harness.run()
    assert len({groups_of(harness)[int(r[1:])] for r in rest}) >= 1
    harness.assert_solo()


def test_a_shared_prompt_spreads_once_its_home_has_enough_to_do() -> None:
    harness = Harness(num_groups=2, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=64, model=NO_EOS)
    shared = prompt(80, 0)
    harness.add(shared, 2)
    harness.run()
    for i in range(40):
        harness.add([*shared, *prompt(20, i)], 20)
    harness.run()
    counts = list(groups_of(harness).values())
    assert counts.count(0) > 5
    assert counts.count(1) > 5
    harness.assert_solo()


def test_a_group_that_does_not_move_gets_nothing_left_to_it() -> None:
    harness = Harness(num_groups=2, num_blocks=400, model=NO_EOS)
    shared = prompt(80, 0)
    harness.add(shared, 2)
    harness.run()
    home = groups_of(harness)[0]
    other = 1 - home
    harness.add([*shared, 4], 5)
    harness.schedule(home)  # and no result ever comes
    harness.now += 5.0
    again = harness.add([*shared, 5], 5)
    assert harness.schedule(other) is not None
    harness.finish_step(other)
    assert len(harness.text(again)) <= 1
    assert groups_of(harness)[int(again[1:])] == other

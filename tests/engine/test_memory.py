"""KV memory: prefix cache, preemption, forks. The fake workers prove that nobody reads or writes another's blocks."""

from __future__ import annotations

import pytest
from fake_worker import Model
from harness import NO_EOS, Harness, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.engine.admission import MAX_PREEMPTIONS
from orcaserve.engine.block_pool import BlockPool
from orcaserve.engine.prefix import PrefixKeys, root_key

# The pool


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "name"]), st.integers(0, 9)), max_size=80))
def test_every_block_of_a_pool_is_accounted_for(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    held: list[int] = []
    for move, pick in moves:
        if move == "take" and pool.num_free:
            block = pool.allocate()
            assert block not in held
            held.append(block)
        elif move == "share" and (block := pool.find(bytes([pick]))) is not None:
            pool.share(block)
            held.append(block)
        elif move == "drop" and held:
            pool.release([held.pop(pick % len(held))])
        elif move == "name" and held:
            pool.publish(held[pick % len(held)], bytes([pick]))
        pool.check_invariants()
        assert pool.num_free == 6 - len(set(held))
        assert all(pool.ref_count(block) == held.count(block) for block in range(6))


def test_cached_blocks_are_given_away_last_and_the_longest_free_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for i in (0, 1):
        pool.publish(blocks[i], bytes([i]))
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    assert pool.num_cached == 2
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
    assert pool.find(bytes([0])) is pool.find(bytes([1])) is None


def test_restored_blocks_are_found_and_given_away_in_their_order_after_blank_ones() -> None:
    pool = BlockPool(4)
    pool.restore({2: b"end", 0: b"start"})
    pool.check_invariants()
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert [pool.find(key) for key in (b"start", b"end")] == [0, 2]
    assert [pool.allocate() for _ in range(4)] == [1, 3, 2, 0]
    assert pool.find(b"start") is None


def test_a_pool_notices_a_double_release() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


# Keys


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=32, max_size=32), st.lists(st.integers(1, 8), max_size=5))
def test_keys_do_not_depend_on_when_they_are_asked_for(ids: list[int], asks: list[int]) -> None:
    at_once = PrefixKeys(root_key("t", "s"), 4)
    bit_by_bit = PrefixKeys(root_key("t", "s"), 4)
    for ask in asks:
        bit_by_bit.up_to(ask, ids)
    assert bit_by_bit.up_to(8, ids) == at_once.up_to(8, ids)


def test_keys_differ_by_tenant_salt_and_everything_before() -> None:
    ids = list(range(8))
    roots = [root_key("a", ""), root_key("", "a"), root_key("ab", "c"), root_key("a", "bc"), root_key("", "")]
    keys = {key for root in roots for key in PrefixKeys(root, 4).up_to(2, ids)}
    keys |= set(PrefixKeys(roots[-1], 4).up_to(2, [9, *ids[1:]]))
    assert len(keys) == 12


# Prefix cache


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17, 32])
def test_case_16_a_fully_cached_prompt_still_computes_its_last_token(length: int) -> None:
    harness = Harness(model=NO_EOS)
    ids = prompt(length)
    for _ in range(3):
        harness.add(ids, 8, sampling={"seed": 7})
        harness.run()
    longer = harness.add([*ids, *prompt(4, 1)], 8)
    harness.run()
    harness.assert_solo()
    assert harness.text("r0") == harness.text("r1") == harness.text("r2")
    full = (length - 1) // 4 * 4
    assert [harness.first_delta(r).num_cached_tokens for r in ("r0", "r1", "r2")] == [0, full, full]
    assert harness.first_delta(longer).num_cached_tokens == length // 4 * 4


def test_generated_text_is_found_again_by_the_next_turn() -> None:
    harness = Harness(model=NO_EOS)
    first = prompt(10)
    harness.add(first, 22)
    harness.run()
    turn = harness.add([*first, *harness.text("r0"), *prompt(6, 2)], 4)
    harness.run()
    assert harness.first_delta(turn).num_cached_tokens == 28, "all full blocks whose tokens were computed"
    harness.assert_solo()


def test_case_14_tenants_and_salts_never_share() -> None:
    harness = Harness(model=NO_EOS, num_blocks=200)
    ids = prompt(40)
    cached = {}
    for tenant, salt in [("a", ""), ("b", ""), ("a", ""), ("a", "x"), ("a", "y"), ("a", "x")]:
        request = harness.add(ids, 3, tenant=tenant, cache_salt=salt)
        harness.run()
        cached.setdefault((tenant, salt), []).append(harness.first_delta(request).num_cached_tokens)
    assert cached == {("a", ""): [0, 36], ("b", ""): [0], ("a", "x"): [0, 36], ("a", "y"): [0]}


def test_case_15_nothing_is_remembered_of_a_failed_admission() -> None:
    harness = Harness(num_blocks=20, model=NO_EOS)
    prefix = prompt(24)
    harness.add(prefix, 2)
    harness.run()
    hog = harness.add(prompt(45, 1), 12)
    harness.round()
    asks = harness.add([*prefix, *prompt(14, 2)], 6)
    harness.round()
    assert harness.text(asks) == [], "6 blocks match, but there is no room for the rest"
    harness.run()
    assert len(harness.text(hog)) == 12
    harness.assert_solo()


def test_a_block_is_not_found_before_the_step_that_fills_it_is_done() -> None:
    harness = Harness(model=NO_EOS)
    ids = prompt(20)
    harness.add(ids, 4)
    harness.schedule()
    harness.add(ids, 4)
    harness.schedule()
    early = harness.scheduler.stats()
    assert early.prefix_cache_hits == 0
    harness.run()
    harness.assert_solo()


def test_caching_can_be_turned_off() -> None:
    harness = Harness(model=NO_EOS, enable_prefix_caching=False)
    for _ in range(2):
        harness.add(prompt(20), 4)
        harness.run()
    assert harness.scheduler.stats().prefix_cache_hits == 0
    harness.assert_solo()


# Preemption


def test_a_small_pool_changes_no_text() -> None:
    """12 blocks of 16 tokens, 8 requests of 64 tokens."""
    harness = Harness(num_blocks=12, block_size=16, watermark=0.01, model=NO_EOS)
    for i in range(8):
        harness.add(prompt(10 + i, i), 64)
    harness.run()
    harness.assert_solo()
    assert harness.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_case_19_preemptions_are_bounded_and_the_oldest_always_gets_on(in_flight: int, watermark: float) -> None:
    harness = Harness(num_blocks=20, watermark=watermark, max_steps_in_flight=in_flight, model=NO_EOS)
    oldest = harness.add(prompt(20), 50)
    rounds = 0
    while harness.reason(oldest) is None:
        if rounds % 3 == 0:
            harness.add(prompt(6 + rounds % 9, rounds + 1), 12 + rounds % 17)
        harness.round()
        rounds += 1
    solo = Harness(num_blocks=20, max_steps_in_flight=in_flight, model=NO_EOS)
    solo.add(prompt(20), 50)
    solo_rounds = 0
    while solo.round():
        solo_rounds += 1
    assert rounds <= solo_rounds + 2, "newcomers never hold up the oldest"
    worst = 0
    while harness.round():
        for request in harness.scheduler._ledger:
            worst = max(worst, request.num_preemptions)
    assert harness.scheduler.stats().num_preemptions > 0
    assert 0 < worst <= MAX_PREEMPTIONS
    harness.assert_solo()


def test_preempted_work_comes_back_before_newer_requests() -> None:
    harness = Harness(num_blocks=14, model=NO_EOS)
    for i in range(3):
        harness.add(prompt(12, i), 30)
    started: list[int] = []
    while harness.round():
        if harness.scheduler.stats().num_preemptions and len(harness.requests) < 6:
            harness.add(prompt(4, 9), 3)
    for _, plan in harness.log:
        started += [new.sampling.seed for new in plan.new_slots]
    first_new = min(started.index(i) for i in (3, 4, 5))
    assert set(started[:first_new]) == {0, 1, 2}
    assert max(i for i, seed in enumerate(started) if seed < 3) < first_new or started.count(2) > 1
    harness.assert_solo()


def test_no_one_is_preempted_while_a_step_in_flight_brings_the_blocks_back() -> None:
    harness = Harness(num_blocks=6, model=NO_EOS)
    harness.add(prompt(8), 5)  # ends just when the other needs its fourth block
    harness.add(prompt(8, 1), 12)
    harness.run()
    harness.assert_solo()
    assert harness.scheduler.stats().num_preemptions == 0


def test_a_token_on_its_way_to_a_preempted_request_is_kept() -> None:
    harness = Harness(num_blocks=8, model=NO_EOS, max_steps_in_flight=3)
    for i in range(3):
        harness.add(prompt(7, i), 20)
    harness.run()
    harness.assert_solo()
    assert harness.scheduler.stats().num_preemptions > 0


def test_admission_keeps_a_watermark_free() -> None:
    harness = Harness(num_blocks=20, watermark=0.2, model=NO_EOS)  # 4 blocks
    for i in range(4):
        harness.add(prompt(24, i), 4)  # 6 blocks each
    harness.schedule()
    assert harness.scheduler.stats().running == 2
    harness.finish_step()
    harness.run()
    harness.assert_solo()


# Choices


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompt_and_copy_what_they_write(length: int, caching: bool) -> None:
    harness = Harness(model=NO_EOS, enable_prefix_caching=caching)
    harness.add(prompt(length), 10, n=4)
    used = 0
    while harness.round():
        used = max(used, harness.scheduler.stats().groups[0].used_blocks)
    harness.assert_solo()
    shared = (length - 1) // 4
    own = -(-(length + 10) // 4) - shared
    assert used <= shared + 4 * own
    copies = [pair for _, plan in harness.log for pair in plan.block_copies]
    assert len(copies) == (3 if (length - 1) % 4 else 0)
    computed = sum(worker.num_computed_tokens for worker in harness.workers.values())
    assert computed == length + 3 + 4 * 9, "the prompt once, its last token for each choice"


def test_choices_that_find_no_slot_queue_up() -> None:
    harness = Harness(max_num_seqs=2, model=NO_EOS)
    harness.add(prompt(18), 6, n=5)
    harness.add(prompt(5, 1), 6)
    harness.run()
    harness.assert_solo()


def test_choices_in_a_pool_too_small_for_all() -> None:
    harness = Harness(num_blocks=12, model=NO_EOS)
    harness.add(prompt(18), 20, n=6)
    harness.run()
    harness.assert_solo()


def test_choices_survive_the_first_one_ending_at_once() -> None:
    harness = Harness(model=Model(eos_share=1.0))
    harness.add(prompt(10), 6, n=3)
    harness.run()
    harness.assert_solo()

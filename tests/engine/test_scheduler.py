"""What a step is made of: budget, chunks, slots, overlap, ends; and what an abort frees."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from fake_worker import Model
from harness import EOS, NO_EOS, Harness, decode_slots, make_config, num_tokens, prompt, rows

from orcaserve.engine.messages import StepPlan, TokenDelta
from orcaserve.engine.scheduler import Scheduler


def test_messages_survive_the_wire() -> None:
    harness = Harness()
    harness.add(prompt(10), n=2)
    harness.run()
    for _, plan in harness.log:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    for delta in harness.deltas:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=TokenDelta) == delta


def test_decodes_go_first_and_prompts_share_what_is_left() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 40)
    harness.round()
    harness.add(prompt(70, 5), 4)
    while harness.text("r1") == []:
        plan = harness.schedule()
        assert plan is not None
        assert 0 in decode_slots(plan), "the running stream gets a token in every step"
        assert num_tokens(plan) <= 32
        harness.finish_step()
    harness.run()
    harness.assert_solo()


def test_chunk_cap_lets_several_prompts_progress_together() -> None:
    harness = Harness(long_prefill_token_threshold=10)
    for i in range(3):
        harness.add(prompt(30, i), 2)
    plan = harness.schedule()
    assert plan is not None
    assert [(c.start, c.num_tokens, c.samples) for c in plan.chunks] == [(0, 10, False), (0, 10, False), (0, 10, False)]
    harness.finish_step()
    harness.run()
    harness.assert_solo()


@pytest.mark.parametrize("length", [65, 32, 64, 31])
def test_case_17_a_half_done_prompt_beside_short_ones(length: int) -> None:
    harness = Harness(model=NO_EOS)
    for i in range(7):
        harness.add(prompt(5 + 2 * i, i), 8)
    long = harness.add(prompt(length, 9), 8)
    while harness.round():
        first = [d for d in harness.deltas if d.request_id == long]
        done = sum(c.num_tokens for _, p in harness.log for c in p.chunks if c.slot == 7)
        assert done >= length or not first, "an unfinished prompt emits nothing"
    harness.assert_solo()
    whole = Harness(model=NO_EOS, enable_chunked_prefill=False, max_num_batched_tokens=256)
    for request in harness.requests.values():
        whole.add(request.prompt_token_ids, 8)
    whole.run()
    assert [whole.text(r) for r in whole.requests] == [harness.text(r) for r in harness.requests]


def test_without_chunking_prompts_are_computed_in_one_piece_and_decodes_pause_every_second_step_at_most() -> None:
    harness = Harness(model=NO_EOS, enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    for i in range(4):
        harness.add(prompt(4, i), 50)
    harness.round()
    for i in range(4, 8):
        harness.add(prompt(64 - 2, i), 2)
    paused = []
    while harness.reason("r7") is None:
        plan = harness.schedule()
        assert plan is not None
        harness.finish_step()
        assert all(c.samples for c in plan.chunks), "all that is owed in one piece"
        if harness.reason("r0") is None:
            paused.append(rows(plan) == 0)
    assert any(paused)
    assert not any(a and b for a, b in pairwise(paused))
    harness.run()
    harness.assert_solo()


def test_without_chunking_the_budget_must_hold_a_whole_prompt() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(32\) must be at least max_model_len \(256\)"):
        Scheduler(make_config(enable_chunked_prefill=False))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"watermark": 1.0},
        {"queue_timeout_s": -1.0},
        {"max_steps_in_flight": 0},
        {"tenant_weights": {"a": 0.0}},
    ],
)
def test_contradictory_limits_are_named(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Scheduler(make_config(**change))


def test_a_plan_is_made_before_the_result_of_the_one_before() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 6)
    first, second = harness.schedule(), harness.schedule()
    assert first is not None
    assert second is not None
    assert decode_slots(second) == [0], "the decode goes on from a token that is not known yet"
    assert harness.schedule() is None, "two steps in flight are the limit"
    harness.finish_step()
    harness.run()
    harness.assert_solo()


def test_no_step_is_planned_past_a_length_that_is_known_ahead() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 3)
    harness.run()
    assert [rows(plan) for _, plan in harness.log] == [0, 1, 1]
    assert harness.reason("r0") == "length"


def test_the_surplus_row_of_a_request_that_stopped_is_dropped() -> None:
    harness = Harness(model=Model(eos_share=1.0))
    harness.add(prompt(5), 10)
    other = harness.add(prompt(6, 2), 4, sampling={"ignore_eos": True})
    harness.run()
    assert harness.text("r0") == [EOS]
    assert harness.reason("r0") == "stop"
    assert harness.first_delta("r0").stop_token_id == EOS
    assert len(harness.text(other)) == 4
    harness.assert_solo()


def test_a_freed_slot_and_its_blocks_are_used_again_at_once() -> None:
    harness = Harness(num_blocks=4, max_num_seqs=1, model=Model(eos_share=1.0))
    for i in range(4):
        harness.add(prompt(14, i), 2)
    harness.run()
    harness.assert_solo()


def test_min_tokens_holds_back_every_stop() -> None:
    harness = Harness(model=Model(eos_share=1.0))
    harness.add(prompt(5), 10, sampling={"min_tokens": 4})
    harness.run()
    harness.assert_solo()
    assert len(harness.text("r0")) == 5


def test_a_step_costs_nothing_when_there_is_nothing_to_do() -> None:
    harness = Harness()
    assert harness.schedule() is None
    assert not harness.scheduler.has_work(0)
    assert harness.scheduler.schedule(7, 0.0) is None, "an unknown group has nothing to do"


# Abort


def test_case_20_abort_frees_everything_at_once() -> None:
    harness = Harness(model=NO_EOS)
    for round_ in range(50):
        running = harness.add(prompt(20, round_), 100)
        queued = harness.add(prompt(200, round_), 20)
        for _ in range(round_ % 4):
            harness.round()
        harness.schedule()
        harness.scheduler.abort(running)
        harness.scheduler.abort(queued)
        harness.scheduler.abort("never heard of")
        stats = harness.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert stats.groups[0].used_blocks == 0
        while harness.plans[0]:
            assert harness.finish_step() == [], "a late result for an aborted request is dropped"


def test_an_abort_that_overtakes_its_request_wins() -> None:
    harness = Harness()
    harness.scheduler.abort("r0")
    harness.add(prompt(5))
    assert not harness.scheduler.has_work(0)


def test_one_choice_can_be_aborted_alone() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 6, n=3)
    harness.scheduler.abort("r0", 0)
    harness.run()
    assert harness.text("r0", 0) == []
    for choice in (1, 2):
        assert harness.text("r0", choice) == harness.solo("r0", choice)


def test_a_lost_stream_takes_its_requests_along() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 20, stream=1)
    kept = harness.add(prompt(6), 20, stream=2)
    harness.add(prompt(100), 20, stream=1)
    harness.round()
    harness.scheduler.abort_stream(1)
    harness.run()
    assert harness.text(kept) == harness.solo(kept)
    assert harness.scheduler.stats().finished == {"abort": 2, "length": 1}

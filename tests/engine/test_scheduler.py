"""What a step is made of: budget, chunks, slots, overlap, ends."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from fake_worker import Model
from harness import EOS, Harness, decode_slots, make_config, num_tokens, rows

from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter, QueueFull, RequestRefused
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult, TokenDelta
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler

NO_EOS = Model(eos_share=0.0)


def prompt(length: int, start: int = 3) -> list[int]:
    return [(start * 13 + 7 * i) % 47 + 3 for i in range(length)]


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


# The door


def test_case_05_lengths_are_refused_with_numbers() -> None:
    harness = Harness(num_blocks=1000)
    with pytest.raises(ContextLengthExceeded, match=r"256 tokens.*357 tokens \(356 in the prompt, 1 "):
        harness.add(prompt(356), 1)
    with pytest.raises(ContextLengthExceeded, match="266 tokens"):
        harness.add(prompt(10), 256)
    with pytest.raises(InvalidParameter, match="max_tokens must be at least 1, got -5"):
        harness.add(prompt(10), -5)
    with pytest.raises(InvalidParameter, match="no tokens"):
        harness.add([], 5)
    with pytest.raises(InvalidParameter, match="n must be at least 1, got 0"):
        harness.add(prompt(3), 5, n=0)
    harness.add(prompt(255), 1)
    harness.run()
    assert len(harness.text("r0")) == 1


def test_case_18_what_cannot_fit_the_pool_is_refused_and_blocks_nobody() -> None:
    harness = Harness(num_blocks=16, model=NO_EOS)  # 64 tokens
    with pytest.raises(ContextLengthExceeded, match="64 tokens"):
        harness.add(prompt(100), 10)
    harness.add(prompt(10), 5)
    harness.run()
    harness.assert_solo()
    dry = harness.add(prompt(40), 100)
    harness.run()
    assert harness.reason(dry) == "length"
    assert len(harness.text(dry)) + 40 == 65, "64 in the pool, and the last token needs no room"
    assert harness.text(dry) == harness.solo(dry)[: len(harness.text(dry))]


def test_a_full_queue_refuses_at_once_with_a_time_to_come_back() -> None:
    harness = Harness(max_num_seqs=2, max_queued_requests=3)
    for i in range(5):  # two slots and three places
        harness.add(prompt(20, i))
    with pytest.raises(QueueFull, match="5 requests are waiting, 3 may") as caught:
        harness.add(prompt(20))
    assert caught.value.retry_after_s == 1.0, "nothing is measured yet"
    harness.run()
    harness.add(prompt(20, 8))
    harness.run()


def test_a_queue_full_of_tokens_refuses_too() -> None:
    harness = Harness(max_queued_tokens=100)
    harness.add(prompt(90))
    with pytest.raises(QueueFull, match="90 prompt tokens are waiting, 100 may"):
        harness.add(prompt(11))
    harness.add(prompt(10))


def test_retry_after_follows_the_measured_rate() -> None:
    scheduler = Scheduler(make_config(max_num_seqs=1, max_queued_requests=1))
    scheduler.add_group(0, 64)
    scheduler.add(GenerateRequest("a", tuple(prompt(32)), SamplingParams(100, seed=0)), 0.0)
    plan = scheduler.schedule(0, 0.0)
    assert plan is not None
    scheduler.apply(0, StepResult(plan.step_id, np.array([5], np.int32).tobytes()), 4.0)  # 32 tokens in 4 s
    scheduler.add(GenerateRequest("b", tuple(prompt(80)), SamplingParams(10, seed=0)), 4.0)
    with pytest.raises(QueueFull) as caught:
        scheduler.add(GenerateRequest("c", tuple(prompt(8)), SamplingParams(10, seed=0)), 4.0)
    assert caught.value.retry_after_s == pytest.approx(80 / 8)


def test_an_accepted_request_that_comes_again_is_never_turned_away_by_the_queue() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=1)
    harness.add(prompt(5))
    harness.add(prompt(5))
    with pytest.raises(QueueFull):
        harness.add(prompt(5))
    harness.add(prompt(5), output_token_ids=(7,))


def test_the_same_id_on_another_stream_is_refused() -> None:
    harness = Harness()
    harness.add(prompt(5), request_id="x", stream=1)
    with pytest.raises(InvalidParameter, match="'x', choice 0 is running already"):
        harness.add(prompt(5), request_id="x", stream=2)


# Deadlines


def test_a_deadline_or_queue_timeout_ends_a_request_before_its_prompt_costs_anything() -> None:
    harness = Harness(max_num_seqs=1, queue_timeout_s=5.0, model=NO_EOS)
    harness.add(prompt(8), 100)
    late = harness.add(prompt(8, 2), 4, deadline_s=0.5)
    timed_out = harness.add(prompt(8, 3), 4)
    harness.now = 0.1
    harness.round()
    harness.now = 1.0
    harness.round()
    assert harness.reason(late) == "timeout"
    harness.now = 5.1
    assert [d.request_id for d in harness.take(harness.scheduler.expire(harness.now))] == [timed_out]
    harness.run()
    assert harness.reason("r0") == "length", "one that runs has no timeout"
    assert sum(c.num_tokens for _, p in harness.log for c in p.chunks) == 8
    assert harness.scheduler.stats().finished == {"timeout": 2, "length": 1}


def test_all_choices_of_a_request_time_out() -> None:
    harness = Harness(num_groups=0, queue_timeout_s=1.0)
    harness.add(prompt(8), n=3)
    harness.now = 2.0
    harness.take(harness.scheduler.expire(harness.now))
    assert [harness.reason("r0", choice) for choice in range(3)] == ["timeout"] * 3


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


# Resumption, groups


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


# Results


def test_a_failed_row_ends_its_request_alone() -> None:
    harness = Harness(model=NO_EOS)
    harness.add(prompt(5), 10)
    other = harness.add(prompt(6), 10)
    harness.round()
    harness.round()
    harness.schedule()
    harness.finish_step(failed={0: "the grammar has no way on"})
    harness.run()
    assert harness.reason("r0") == "error"
    assert next(d for d in harness.deltas if d.finish_reason == "error").error == "the grammar has no way on"
    assert harness.text(other) == harness.solo(other)


def test_case_23_accepted_drafts_are_cut_at_the_stop_before_the_length() -> None:
    scheduler = Scheduler(make_config(num_speculative_tokens=5))
    scheduler.add_group(0, 64)
    sampling = SamplingParams(6, seed=0, logprobs=2, stop_token_ids=(40,))
    scheduler.add(GenerateRequest("a", tuple(prompt(9)), sampling), 0.0)
    plan = scheduler.schedule(0, 0.0)
    assert plan is not None
    scheduler.apply(0, StepResult(plan.step_id, np.array([11], np.int32).tobytes()), 0.0)
    plan = scheduler.schedule(0, 0.0)
    assert plan is not None
    assert plan.num_draft_tokens == 5
    accepted = np.array([21, 22, 40, 24, 25, 26], np.int32)
    logprobs: dict[int, list[object]] = {0: [f"of {i}" for i in range(6)]}
    result = StepResult(plan.step_id, accepted.tobytes(), np.array([6], np.int32).tobytes(), logprobs=logprobs)  # type: ignore[arg-type]
    (delta,) = scheduler.apply(0, result, 0.0)[0]
    assert delta.token_ids == (21, 22, 40)
    assert delta.finish_reason == "stop"
    assert delta.stop_token_id == 40
    assert delta.logprobs == logprobs[0][:3]
    assert scheduler.stats().groups[0].used_blocks == 0


def test_speculation_never_passes_max_tokens_and_changes_no_text() -> None:
    for drafts in (0, 1, 3, 6):
        harness = Harness(num_blocks=40, num_speculative_tokens=drafts)
        for i in range(8):
            harness.add(prompt(5 + 6 * i, i), 7 + i)
        harness.run()
        harness.assert_solo()


def test_drafts_leave_half_the_budget_to_prompts() -> None:
    harness = Harness(num_speculative_tokens=8, max_num_batched_tokens=32, model=NO_EOS)
    for i in range(4):
        harness.add(prompt(5, i), 60)
    harness.round()
    plan = harness.schedule()
    assert plan is not None
    assert plan.num_draft_tokens == 7, "4 rows of 1 + 7 are the budget"
    harness.finish_step()
    harness.add(prompt(100), 5)
    plan = harness.schedule()
    assert plan is not None
    assert (plan.num_draft_tokens, plan.chunks[0].num_tokens) == (3, 16)


def test_prompt_logprobs_come_once_with_the_first_token_and_skip_nothing() -> None:
    harness = Harness(model=NO_EOS)
    shared = prompt(40)
    harness.add(shared, 4)
    harness.run()
    asks = harness.add(shared, 4, sampling={"prompt_logprobs": 1}, n=2)
    harness.run()
    first = harness.first_delta(asks)
    assert first.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 40
    assert sum(d.prompt_logprobs is not None for d in harness.deltas) == 1
    harness.assert_solo()


def test_queue_time_is_reported_with_the_first_delta_only() -> None:
    harness = Harness(max_num_seqs=1, model=NO_EOS)
    harness.add(prompt(5), 10)
    waits = harness.add(prompt(6), 3)
    harness.run()
    deltas = [d for d in harness.deltas if d.request_id == waits]
    assert deltas[0].queue_s > 0.05
    assert [d.queue_s for d in deltas[1:]] == [0.0] * (len(deltas) - 1)


def test_deltas_go_to_the_stream_that_asked() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add_group(0, 64)
    for i, stream in enumerate((3, 4, 3)):
        scheduler.add(GenerateRequest(f"s{stream}-{i}", (5, 6), SamplingParams(2, seed=0), stream=stream), 0.0)
    plan = scheduler.schedule(0, 0.0)
    assert plan is not None
    deltas = scheduler.apply(0, StepResult(plan.step_id, np.array([9, 9, 9], np.int32).tobytes()), 0.0)
    assert {stream: len(some) for stream, some in deltas.items()} == {3: 2, 4: 1}
    assert all(d.request_id.startswith(f"s{stream}-") for stream, some in deltas.items() for d in some)


def test_stats_add_up() -> None:
    harness = Harness(model=NO_EOS)
    for i in range(5):
        harness.add(prompt(10 + i, i), 6, tenant="ab"[i % 2])
    stats = harness.scheduler.stats()
    assert (stats.waiting, stats.waiting_tokens, stats.waiting_by_tenant) == (5, 60, {"a": 3, "b": 2})
    harness.round()
    group = harness.scheduler.stats().groups[0]
    assert group.used_blocks + group.free_blocks == group.total_blocks == 64
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.generation_tokens == 30
    assert stats.prompt_tokens == 60 == sum(w.num_computed_tokens for w in harness.workers.values()) - 25
    assert stats.finished == {"length": 5}

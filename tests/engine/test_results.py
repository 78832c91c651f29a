"""What comes of a result: deltas, failed rows, accepted drafts, logprobs, statistics."""

from __future__ import annotations

import numpy as np
from harness import NO_EOS, Harness, make_config, prompt

from orcaserve.engine.messages import GenerateRequest, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler


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

"""The door and the queue: what is refused, when to come back, deadlines."""

from __future__ import annotations

import numpy as np
import pytest
from harness import NO_EOS, Harness, make_config, prompt

from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter, QueueFull
from orcaserve.engine.messages import GenerateRequest, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler


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

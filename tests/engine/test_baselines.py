"""Static batching: right texts, real padding, no one enters before the batch is done."""

from __future__ import annotations

import pytest
from fake_worker import FakeWorker
from harness import NO_EOS, Harness, decode_slots, prompt, rows

from orcaserve.engine.baselines import StaticBatchScheduler


def make(num_blocks: int = 200, **config: object) -> Harness:
    harness = Harness(num_blocks, scheduler=StaticBatchScheduler, **config)  # type: ignore[arg-type]
    for worker in harness.workers.values():
        worker.scratch_block = num_blocks - 1
    return harness


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [8, 100])
def test_texts_are_those_of_solo_runs(budget: int, in_flight: int) -> None:
    harness = make(max_num_seqs=4, max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    for i in range(10):
        harness.add(prompt(3 + 7 * i % 40, i), 4 + 5 * i % 30, n=1 + i % 2)
    harness.run()
    harness.assert_solo()


def test_padding_is_computed_and_counted() -> None:
    harness = make(max_num_seqs=3, model=NO_EOS)
    lengths, outputs = (10, 50, 25), (8, 20, 5)
    for length, output in zip(lengths, outputs, strict=True):
        harness.add(prompt(length, length), output)
    harness.run()
    stats = harness.scheduler.stats()
    filler = sum(50 - length for length in lengths)
    idle_rows = sum(20 - output for output in outputs)
    assert stats.padding_tokens == filler + idle_rows
    assert stats.prompt_tokens == sum(lengths)
    assert stats.generation_tokens == sum(outputs)
    (worker,) = harness.workers.values()
    assert worker.num_computed_tokens == 3 * 50 + 3 * 19, "three rows of 50, and 19 decodes each after the first token"


def test_nobody_enters_before_the_batch_is_done() -> None:
    harness = make(max_num_seqs=2, model=NO_EOS)
    harness.add(prompt(5, 0), 3)
    harness.add(prompt(5, 1), 30)
    late = harness.add(prompt(5, 2), 3)
    while harness.reason("r1") is None:
        harness.round()
        assert harness.text(late) == []
    harness.run()
    harness.assert_solo()
    plans = [plan for _, plan in harness.log if rows(plan)]
    assert all(decode_slots(plan) == [0, 1] for plan in plans[:29]), "the ended row goes on"


def test_a_batch_is_as_large_as_memory_allows_and_one_alone_always_runs() -> None:
    harness = make(num_blocks=16, max_num_seqs=8, model=NO_EOS)
    for i in range(4):
        harness.add(prompt(20, i), 8)
    big = harness.add(prompt(40, 9), 100)
    harness.run()
    assert harness.reason(big) == "length"
    assert harness.text(big) == harness.solo(big)[: len(harness.text(big))]
    assert harness.text("r3") == harness.solo("r3")


def test_aborts_group_loss_and_late_results() -> None:
    harness = make(model=NO_EOS)
    harness.add(prompt(5, 0), 20)
    gone = harness.add(prompt(6, 1), 20)
    harness.round()
    harness.scheduler.abort(gone)
    harness.schedule()
    late = harness.work()
    harness.lose_group(0)
    assert harness.scheduler.apply(0, late, harness.now) == {}
    harness.add_group(0, 100)
    harness.workers[0].scratch_block = 99
    harness.run()
    assert harness.text("r0") == harness.solo("r0")
    assert harness.scheduler.stats().finished == {"abort": 1, "length": 1}


def test_a_draining_group_forms_no_batch() -> None:
    harness = make()
    harness.scheduler.drain_group(0)
    harness.add(prompt(5, 0), 3)
    assert harness.schedule() is None
    assert not harness.scheduler.has_work(0)


def test_the_group_must_have_a_block_beside_the_scratch_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        make(num_blocks=1)
    with pytest.raises(ValueError, match="group 0 is here already"):
        make().scheduler.add_group(0, 5)
    assert FakeWorker(2, 4, 1, 8, 8).scratch_block == -1

"""The virtual clock: every request ends once with all its tokens; the demonstration's totals are pinned."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import Chunk, StepPlan
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest import demonstration
from orcaserve.loadtest.arrivals import ClosedLoop, OpenLoop, constant
from orcaserve.loadtest.fleet import Fleet, fit_lengths, run_fleet
from orcaserve.loadtest.metrics import Slo
from orcaserve.loadtest.model_shape import LLAMA_3_8B, LLAMA_3_70B
from orcaserve.loadtest.outcome import figures, merge
from orcaserve.loadtest.plan import plan, rows
from orcaserve.loadtest.simulate import PlanMeter, Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import H100, StepTime
from orcaserve.loadtest.workload import LoadRequest

STEP_TIME = StepTime(LLAMA_3_8B, H100, 1)


def simulation(requests, arrivals, groups=1, slots=4, budget=64, blocks=200, ahead=1, **options) -> Simulation:
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=1024,
            eos_token_ids=(),
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_steps_in_flight=ahead + 1,
            enable_prefix_caching=False,
        )
    )
    for group in range(groups):
        scheduler.add_group(group, blocks)
    executors = {group: VirtualWorkers(STEP_TIME, slots) for group in range(groups)}
    return Simulation(scheduler, executors, requests, arrivals, steps_ahead=ahead, **options)


lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    sizes=lengths,
    groups=st.integers(1, 3),
    slots=st.integers(1, 6),
    budget=st.integers(8, 128),
    blocks=st.integers(20, 80),
    ahead=st.integers(0, 1),
    users=st.integers(0, 6),
    rate=st.floats(1, 2000),
)
def test_every_request_ends_once_with_all_its_tokens(sizes, groups, slots, budget, blocks, ahead, users, rate) -> None:
    requests = [LoadRequest(i, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    arrivals = ClosedLoop(users) if users else constant(len(requests), rate)
    outcome = simulation(requests, arrivals, groups, slots, budget, blocks, ahead, keep_steps=True).run()
    assert (outcome.ends == 1).all()
    assert outcome.output_tokens.tolist() == [output for _, output in sizes]
    assert outcome.finish_reasons == {"length": len(sizes)}
    assert (outcome.first_s > outcome.arrival_s).all()
    assert (outcome.end_s >= outcome.first_s).all()
    assert outcome.steps is not None
    assert outcome.padding_tokens == outcome.sampled_tokens - outcome.output_tokens.sum()
    assert ahead or not outcome.padding_tokens  # without plans ahead nothing is computed for nobody
    assert sum(outcome.steps.rows) == outcome.sampled_tokens
    assert sum(outcome.steps.prefill_tokens) >= sum(prompt for prompt, _ in sizes)
    assert max(outcome.steps.prefill_tokens) <= budget
    assert figures(outcome, groups).utilisation <= 1 + 1e-9


def test_steps_of_a_group_never_overlap() -> None:
    requests = [LoadRequest(i, 50, 20) for i in range(30)]
    steps = simulation(requests, constant(30, 500.0), keep_steps=True).run().steps
    starts, ends = np.array(steps.start_s), np.array(steps.start_s) + np.array(steps.seconds)
    assert (starts[1:] >= ends[:-1] - 1e-12).all()


def test_a_closed_loop_has_as_many_in_flight_as_users() -> None:
    outcome = simulation([LoadRequest(i, 20, 10) for i in range(40)], ClosedLoop(7)).run()
    moments = sorted([(t, 1) for t in outcome.arrival_s] + [(t, -1) for t in outcome.end_s])
    assert max(np.cumsum([step for _, step in moments])) == 7


def test_the_same_simulation_twice_is_the_same() -> None:
    def once():
        return simulation([LoadRequest(i, 30 + i, 10) for i in range(20)], constant(20, 300.0), groups=2).run()

    first, second = once(), once()
    assert first.end_s.tolist() == second.end_s.tolist()


def test_refused_requests_end_at_the_door() -> None:
    outcome = simulation([LoadRequest(0, 2000, 10), LoadRequest(1, 10, 5)], constant(2, 10.0)).run()
    assert outcome.refused == 1
    assert outcome.output_tokens.tolist() == [0, 5]
    assert figures(outcome, 1).slo_attainment == 0.5


def test_too_few_arrival_times_are_refused() -> None:
    with pytest.raises(ValueError, match="2 requests but only 1"):
        simulation([LoadRequest(0, 5, 5), LoadRequest(1, 5, 5)], OpenLoop(np.zeros(1)))


@settings(max_examples=50)
@given(st.data())
def test_the_meter_follows_contexts_as_a_slow_count_does(data) -> None:
    """Against a dictionary of contexts, for any sequence of chunks and decodes."""
    meter, contexts = PlanMeter(6), dict.fromkeys(range(6), 0)
    for step in range(data.draw(st.integers(1, 12))):
        chunks = []
        for slot in data.draw(st.lists(st.integers(0, 5), max_size=2, unique=True)):
            start = data.draw(st.sampled_from([0, contexts[slot]]))
            chunks.append(Chunk(slot, start, data.draw(st.integers(1, 9)), data.draw(st.booleans())))
        taken = {c.slot for c in chunks}
        decodes = [s for s in range(6) if s not in taken and (step % 3 or data.draw(st.booleans()))]
        slots = np.array(decodes, np.int32).tobytes()
        work = meter.measure(StepPlan(step, [], [], b"", b"", [], chunks, slots))
        for chunk in chunks:
            contexts[chunk.slot] = chunk.start + chunk.num_tokens
        for slot in decodes:
            contexts[slot] += 1
        assert work.kv_tokens == sum(contexts[c.slot] for c in chunks) + sum(contexts[s] for s in decodes)
        assert work.rows == len(decodes) + sum(c.samples for c in chunks)
        assert work.prefill_tokens == sum(c.num_tokens for c in chunks)
        assert work.prefill_pairs == sum(c.start + i + 1 for c in chunks for i in range(c.num_tokens))


def test_the_demonstration_is_the_classic_one() -> None:
    shown = demonstration.run()
    assert demonstration.totals(shown) == pytest.approx(
        {
            "steps": 13,
            "prompt_tokens": 160,
            "output_tokens": 26,
            "computed_tokens": 180,
            "padding_share": 0.0,
            "static_steps": 20,
            "static_computed_tokens": 324,
            "static_padding_share": 144 / 324,
        }
    )
    assert max(s.active_slots for s in shown.steps) == 3
    assert sum(s.tokens for s in shown.steps) == 180
    assert [s.queue_left for s in shown.steps] == sorted((s.queue_left for s in shown.steps), reverse=True)
    assert shown.steps[1].events == "+R4"  # R2 drew its end at the first step and R4 took its slot at the next
    text = demonstration.as_text(shown)
    assert len(text.splitlines()) == 2 + 13 + 5


def fleet(groups: int, tp: int = 4) -> Fleet:
    return Fleet(shape=LLAMA_3_70B, device=H100, tensor_parallel_size=tp, num_groups=groups, groups_per_cell=2)


def test_a_fleet_of_cells_conserves_requests_and_tokens() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(10, 500, 120), rng.integers(1, 80, 120)
    times = np.cumsum(rng.exponential(0.02, 120))
    outcome = run_fleet(fleet(5), times, prompt, output)
    assert fleet(5).cells() == [2, 2, 1]
    assert (outcome.ends == 1).all()
    assert outcome.output_tokens.sum() == output.sum()
    assert np.sort(outcome.arrival_s).tolist() == times.tolist()


def test_merging_keeps_totals() -> None:
    parts = [simulation([LoadRequest(i, 30, 9) for i in range(n)], constant(n, 50.0)).run() for n in (3, 5)]
    whole = merge(parts)
    assert whole.output_tokens.sum() == 8 * 9
    assert whole.num_steps == sum(p.num_steps for p in parts)
    assert whole.gap_counts.sum() == sum(p.gap_counts.sum() for p in parts)


def test_plan_finds_the_smallest_fleet_and_says_why_others_cannot() -> None:
    n = 150
    prompt, output, times = np.full(n, 400), np.full(n, 60), np.arange(n) / 60.0
    found = plan(
        fleet(1), (1, 4, 8), times, prompt, output, Slo(ttft_ms=300, itl_ms=30), attainment=0.95, max_groups=16
    )
    assert found.too_small[1].startswith("0 KV tokens")
    best = found.smallest[4]
    below = [t for t in found.trials if t.tensor_parallel_size == 4 and t.num_groups == best.num_groups - 1]
    assert best.num_groups > 1
    assert below
    assert below[0].figures.slo_attainment < 0.95 <= best.figures.slo_attainment
    assert found.best in found.smallest.values()
    assert len(rows(found)) == 4
    hopeless = plan(fleet(1), (4,), times, prompt, output, Slo(itl_ms=5))
    assert "alone" in hopeless.too_small[4]
    assert not hopeless.trials


def test_lengths_are_cut_to_the_context() -> None:
    prompt, output = fit_lengths(np.array([10, 9000]), np.array([20, 7000]), 8192)
    assert prompt.tolist() == [10, 4096]
    assert output.tolist() == [20, 4096]

"""Workloads are deterministic, stay in their bounds, and say what is wrong with a bad request for one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.loadtest import workload
from orcaserve.loadtest.prompts import WORDS, PromptMaker
from orcaserve.loadtest.trace import TraceRow
from orcaserve.loadtest.workload import BadWorkload, WorkloadSpec, build, from_trace, parse_lengths


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 200))
def test_sharegpt_sampler_is_seeded_and_in_bounds(seed: int, n: int) -> None:
    spec = WorkloadSpec(n, workload.SHAREGPT, seed=seed)
    requests = build(spec)
    assert requests == build(spec)
    assert all(100 <= r.prompt_tokens <= 1500 and 50 <= r.output_tokens <= 800 for r in requests)


def test_sharegpt_sampler_has_a_long_right_tail() -> None:
    prompt, output = workload.SHAREGPT(20_000, np.random.default_rng(0))
    for lengths in (prompt, output):
        assert np.mean(lengths) > 1.15 * np.median(lengths)
    assert build(WorkloadSpec(50, workload.SHAREGPT, seed=1)) != build(WorkloadSpec(50, workload.SHAREGPT, seed=2))


def test_conversations_share_tenant_and_prefix() -> None:
    requests = build(
        WorkloadSpec(40, workload.fixed(10, 5), turns=4, tenants=("a", "b"), num_prefixes=3, prefix_tokens=32)
    )
    for session in range(10):
        turns = requests[4 * session : 4 * session + 4]
        assert [t.turn for t in turns] == [0, 1, 2, 3]
        assert len({(t.tenant, t.prefix, t.session) for t in turns}) == 1
        assert [t.prefix_tokens for t in turns] == [32, 0, 0, 0]
    assert {r.tenant for r in requests} == {"a", "b"}


def test_cancel_share_is_met() -> None:
    requests = build(WorkloadSpec(4000, workload.fixed(10, 50), cancel_share=0.25))
    cancelled = [r for r in requests if r.cancel_after_tokens is not None]
    assert len(cancelled) == pytest.approx(1000, abs=120)
    assert all(1 <= r.cancel_after_tokens < 50 for r in cancelled)


def test_prompts_have_the_wanted_length() -> None:
    request = build(WorkloadSpec(3, workload.fixed(40, 5), num_prefixes=1, prefix_tokens=8))[1]
    maker = PromptMaker(7, first_id=100, last_id=200)
    assert len(maker.ids(request)) == 48
    assert all(100 <= i < 200 for i in maker.ids(request))
    assert len(maker.text(request).split()) == 48
    assert len(set(WORDS)) == len(WORDS)


def test_traces_become_requests_that_fit_the_context() -> None:
    rows = [TraceRow(5000, 3000, 0.0), TraceRow(10, 20, 1.0, session=4), TraceRow(11, 21, 2.0, session=4)]
    long, first, second = from_trace(rows, max_tokens=1000)
    assert (long.prompt_tokens, long.output_tokens) == (500, 500)
    assert (first.turn, second.turn) == (0, 1)
    assert (first.prompt_tokens, first.output_tokens) == (10, 20)


@pytest.mark.parametrize("spec", ["sharegpt", "sharegpt-small", "fixed:128,64", "uniform:5-9,1-1"])
def test_lengths_parse(spec: str) -> None:
    prompt, output = parse_lengths(spec)(10, np.random.default_rng(0))
    assert len(prompt) == len(output) == 10


@pytest.mark.parametrize("spec", ["", "fixed:1", "fixed:0,5", "uniform:9-5,1-1", "uniform:1,2", "normal:3"])
def test_bad_lengths_are_refused(spec: str) -> None:
    with pytest.raises(BadWorkload, match="lengths"):
        parse_lengths(spec)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_requests", 0), ("turns", 0), ("cancel_share", 1.5), ("num_prefixes", 2)],
)
def test_bad_fields_are_named(field: str, value: float) -> None:
    with pytest.raises(BadWorkload, match=field):
        build(WorkloadSpec(**{"num_requests": 5, "lengths": workload.fixed(1, 1), field: value}))

"""Figures computed from hand-made and random event logs agree with their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orcaserve.loadtest.metrics import RequestRecord, Slo, stats_ms, summarize

times = st.floats(0.001, 100, allow_nan=False)


def record(index: int, sent: float, gaps: list[float], tokens: int, status: str = "ok") -> RequestRecord:
    stamps = [sent + sum(gaps[: i + 1]) for i in range(len(gaps))]
    return RequestRecord(index, sent, sent, stamps[0], stamps[-1], stamps, 10, tokens, status=status)


def test_a_log_worked_out_by_hand() -> None:
    records = [
        record(0, 0.0, [0.1, 0.02, 0.02, 0.02], 4),  # ttft 100 ms, tpot 20 ms
        record(1, 1.0, [0.3, 0.05], 6),  # two chunks, six tokens: tpot 50 / 5 = 10 ms
        record(2, 1.5, [0.5], 1),  # no tpot
        RequestRecord(3, 2.0, 2.0, end_s=4.0, error="HTTP 503: busy"),
    ]
    s = summarize(records, Slo(ttft_ms=400))
    assert (s.completed, s.failed, s.duration_s, s.output_tokens) == (3, 1, 4.0, 11)
    assert s.output_throughput == pytest.approx(11 / 4)
    assert s.total_throughput == pytest.approx((11 + 30) / 4)
    assert s.ttft_ms["mean"] == pytest.approx(300)
    assert s.ttft_ms["p50"] == pytest.approx(300)
    assert s.ttft_ms["max"] == pytest.approx(500)
    assert s.tpot_ms["mean"] == pytest.approx(15)
    assert s.itl_ms["mean"] == pytest.approx((20 * 3 + 50) / 4)
    assert s.e2e_ms["max"] == pytest.approx(500)
    assert s.goodput == pytest.approx(2 / 4)
    assert s.slo_attainment == pytest.approx(2 / 4)
    assert s.errors == {"HTTP 503: busy": 1}


@given(
    st.lists(st.tuples(times, st.lists(times, min_size=1, max_size=20), st.integers(2, 500)), min_size=1, max_size=20)
)
def test_definitions_hold_for_any_log(rows) -> None:
    records = [record(i, sent, gaps, tokens) for i, (sent, gaps, tokens) in enumerate(rows)]
    for r, (_, gaps, tokens) in zip(records, rows, strict=True):
        assert r.e2e_s == pytest.approx(sum(gaps))
        assert r.ttft_s == pytest.approx(gaps[0])
        assert r.tpot_s * (tokens - 1) + r.ttft_s == pytest.approx(r.e2e_s)
    s = summarize(records, Slo())
    assert s.slo_attainment == 1.0
    assert s.output_tokens == sum(tokens for _, _, tokens in rows)


@given(st.lists(times, min_size=1, max_size=200))
def test_percentiles_lie_between_their_neighbours(values: list[float]) -> None:
    stats = stats_ms(values)
    ordered = sorted(values)
    for percent in (50, 90, 95, 99):
        place = percent / 100 * (len(values) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert low * 1e3 - 1e-6 <= stats[f"p{percent}"] <= high * 1e3 + 1e-6
    assert stats["max"] == pytest.approx(ordered[-1] * 1e3)


def test_no_values_no_figures() -> None:
    assert stats_ms([]) == {}
    empty = summarize([], Slo())
    assert (empty.output_throughput, empty.goodput) == (0, 0)


def test_slo_is_read_with_its_units() -> None:
    assert Slo.parse("ttft=500ms, itl=50, e2e=20s") == Slo(ttft_ms=500, itl_ms=50, e2e_ms=20_000)
    assert Slo.parse("") == Slo()


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "speed=3", "ttft=-1", "ttft=0ms", "ttft=nan", "ttft=inf"])
def test_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="slo"):
        Slo.parse(text)


def test_slo_looks_at_each_limit() -> None:
    r = record(0, 0.0, [0.1, 0.4], 5)  # ttft 100, tpot 100, e2e 500
    assert Slo(ttft_ms=100.1, itl_ms=100.1, e2e_ms=500.1).holds(r)
    assert not Slo(ttft_ms=99).holds(r)
    assert not Slo(itl_ms=99).holds(r)
    assert not Slo(e2e_ms=499).holds(r)

"""Figures: what adds up, what is refused in silence but for one line in the log, and how cheap it is."""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orcaserve.cluster import figures
from orcaserve.cluster.app_metrics import RequestMetrics
from orcaserve.cluster.exposition import expose
from orcaserve.cluster.figures import BOUNDS, Buckets, Figures, FigureSet, Histogram, quantile

numbers = st.floats(0, 1e5, allow_nan=False)


@given(st.lists(st.lists(numbers, max_size=20), max_size=5))
def test_a_sum_of_reports_is_as_if_one_had_counted(reports: list[list[float]]) -> None:
    """However observations are spread over routers and reports, the whole is the same."""
    whole, summed, router = Figures(), Figures(), Figures()
    for report in reports:
        for value in report:
            for one in (whole, router):
                one.histogram(figures.FIRST_TOKEN).observe(value)
                one.count(figures.PROMPT_TOKENS, value)
        summed.add(router.take())
    assert router.snapshot() == FigureSet({}, {})
    left, right = whole.snapshot(), summed.snapshot()
    for name, family in left.histograms.items():
        assert right.histograms[name][()].counts == family[()].counts
        assert right.histograms[name][()].total == pytest.approx(family[()].total)
    assert right.counters.get(figures.PROMPT_TOKENS, {}) == pytest.approx(left.counters.get(figures.PROMPT_TOKENS, {}))


@given(st.lists(numbers, min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_lies_in_the_right_bucket(values: list[float], share: float) -> None:
    histogram = Histogram(figures.INTER_TOKEN)
    for value in values:
        histogram.observe(value)
    found = quantile(figures.INTER_TOKEN, histogram.buckets(), share)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    bounds = BOUNDS[figures.INTER_TOKEN]
    assert found is not None
    place = bisect_left(bounds, true)
    assert (bounds[place - 1] if place else 0.0) <= found <= bounds[min(place, len(bounds) - 1)]


def test_nothing_observed_has_no_quantile() -> None:
    assert quantile(figures.INTER_TOKEN, Histogram(figures.INTER_TOKEN).buckets(), 0.5) is None


@pytest.mark.parametrize("wrong", [-3.0, math.nan, math.inf, -math.inf])
def test_case_31_what_makes_no_sense_counts_as_nothing_and_is_logged_once(
    wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = Figures()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            one.count(figures.GENERATION_TOKENS, wrong)
            one.histogram(figures.QUEUE_TIME).observe(wrong)
    assert len(caplog.records) == 2
    one.count(figures.GENERATION_TOKENS, 2)
    assert one.snapshot().counters[figures.GENERATION_TOKENS][()] == 2
    assert one.snapshot().histograms[figures.QUEUE_TIME][()] == Buckets(
        [3, *[0] * len(BOUNDS[figures.QUEUE_TIME])], 0.0
    )


def test_a_report_of_another_version_is_taken_as_far_as_it_is_understood() -> None:
    one = Figures()
    one.add(
        FigureSet({"new": {(): 1.0}}, {"new": {(): Buckets([1], 1.0)}, figures.LATENCY: {(): Buckets([1, 2], 1.0)}})
    )
    assert one.snapshot() == FigureSet({"new": {(): 1.0}}, {})


def test_what_does_not_get_through_is_kept() -> None:
    """A scheduler that is away costs no figure; a report is sent once."""
    heard: list[FigureSet] = []
    there = False

    def report(added: FigureSet) -> bool:
        if there:
            heard.append(added)
        return there

    async def run() -> None:
        nonlocal there
        metrics = RequestMetrics("m", report)
        metrics.generated(3, 4)
        metrics.flush()
        metrics.generated(1, 1)
        there = True
        metrics.flush()
        metrics.close()

    asyncio.run(run())
    assert heard[0].counters == {figures.PROMPT_TOKENS: {(): 4.0}, figures.GENERATION_TOKENS: {(): 5.0}}
    assert heard[1:] == [FigureSet({}, {})]


def test_without_a_scheduler_the_text_says_just_that() -> None:
    [family] = text_string_to_metric_families(expose("m", None).decode())
    assert (family.name, family.samples[0].value) == ("orcaserve:scheduler_up", 0.0)


def test_bounds_rise() -> None:
    for name, bounds in BOUNDS.items():
        assert list(accumulate(bounds, max)) == sorted(set(bounds)), name

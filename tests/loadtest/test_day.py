"""A day of few minutes and few tokens: groups come and go with the load, and every request is served."""

from __future__ import annotations

from orcaserve.cluster.autoscaling import ScalingRules
from orcaserve.loadtest.day import DaySpec, compare, elastic_day, fixed_day
from orcaserve.loadtest.fleet import Fleet
from orcaserve.loadtest.metrics import Slo
from orcaserve.loadtest.model_shape import load_shape
from orcaserve.loadtest.step_time import find_device
from orcaserve.loadtest.workload import LoadRequest

FLEET = Fleet(
    shape=load_shape("llama-3-70b"), device=find_device("h100"), tensor_parallel_size=4, num_groups=8, max_num_seqs=2
)
SLO = Slo.parse("ttft=2s")


def requests(spec: DaySpec) -> list[LoadRequest]:
    return [LoadRequest(i, 64, 60) for i in range(spec.num_requests)]


def rules(min_groups: int) -> ScalingRules:
    return ScalingRules(
        min_groups=min_groups,
        max_groups=8,
        ttft_target_s=2.0,
        downscale_delay_s=10.0,
        to_zero_delay_s=30.0,
        lookahead_s=5.0,
    )


def test_scaling_costs_less_than_a_fleet_for_the_peak_and_keeps_the_slo() -> None:
    spec = DaySpec(mean_rate=3.0, hours=0.06, swing=1.0, start_s=5.0)
    [elastic, peak, *_] = compare(FLEET, spec, requests(spec), rules(1), SLO)
    assert elastic.figures.finished == peak.figures.finished == spec.num_requests
    assert elastic.most_groups == peak.most_groups > 2
    assert elastic.group_hours < 0.8 * peak.group_hours
    assert elastic.figures.slo_attainment > 0.97


def test_from_zero_the_first_requests_wait_for_the_first_group() -> None:
    spec = DaySpec(mean_rate=1.0, hours=0.03, swing=0.0, start_s=5.0)
    day = elastic_day(FLEET, spec, requests(spec), rules(0), SLO)
    assert day.figures.finished == spec.num_requests
    assert 4000 < day.figures.ttft_ms["max"] < 8000


def test_a_fixed_fleet_is_paid_all_day() -> None:
    spec = DaySpec(mean_rate=1.0, hours=0.03, swing=0.5)
    day = fixed_day(FLEET, spec, requests(spec), 3, SLO)
    assert day.group_hours == 3 * day.figures.duration_s / 3600
    assert day.num_changes == 0

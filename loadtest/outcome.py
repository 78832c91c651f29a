"""What a simulation came to: each request's times, the totals, and the figures made of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from orcaserve.loadtest.metrics import NO_SLO, Slo, Stats, stats_ms
from orcaserve.loadtest.steps import StepLog


class Outcome(msgspec.Struct):
    """What became of the requests, by index: times on the virtual clock (nan: never), and the totals."""

    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    output_tokens: NDArray[np.int64]
    ends: NDArray[np.int64]  # how often each request ended: 1 is right
    finish_reasons: dict[str, int]
    refused: int
    duration_s: float
    num_steps: int
    busy_s: float  # summed over groups
    computed_tokens: int
    padding_tokens: int  # of these, for nobody
    sampled_tokens: int
    gap_s: NDArray[np.float64]  # inter-token gaps: bin centres ...
    gap_counts: NDArray[np.int64]  # ... and how many tokens waited so long
    steps: StepLog | None
    wall_s: float


class Figures(msgspec.Struct):
    """The summary of an Outcome."""

    requests: int
    finished: int
    refused: int
    duration_s: float
    output_tokens: int
    output_throughput: float
    ttft_ms: Stats
    tpot_ms: Stats
    e2e_ms: Stats
    queue_ms: Stats
    itl_p99_ms: float
    padding_share: float
    slo_attainment: float
    goodput: float
    num_steps: int
    mean_batch: float  # sampled rows of a step
    utilisation: float  # share of the groups' time that went into steps
    wall_s: float


def figures(outcome: Outcome, num_groups: int, slo: Slo = NO_SLO) -> Figures:
    """Means, percentiles and SLO attainment of a simulated run."""
    ttft = outcome.first_s - outcome.arrival_s
    e2e = outcome.end_s - outcome.arrival_s
    several = outcome.output_tokens > 1
    tpot = (e2e - ttft)[several] / (outcome.output_tokens[several] - 1)
    got = np.isfinite(ttft)
    kept = got.copy()
    if slo.ttft_ms is not None:
        kept &= ttft * 1e3 <= slo.ttft_ms
    if slo.itl_ms is not None:
        kept[several] &= tpot * 1e3 <= slo.itl_ms
    if slo.e2e_ms is not None:
        kept &= e2e * 1e3 <= slo.e2e_ms
    duration = outcome.duration_s or 1.0
    total = int(outcome.output_tokens.sum())
    return Figures(
        requests=len(ttft),
        finished=int(got.sum()),
        refused=outcome.refused,
        duration_s=outcome.duration_s,
        output_tokens=total,
        output_throughput=total / duration,
        ttft_ms=stats_ms(ttft[got]),
        tpot_ms=stats_ms(tpot[np.isfinite(tpot)]),
        e2e_ms=stats_ms(e2e[got]),
        queue_ms=stats_ms(outcome.queue_s[np.isfinite(outcome.queue_s)]),
        itl_p99_ms=_weighted_percentile(outcome.gap_s, outcome.gap_counts, 99) * 1e3,
        padding_share=outcome.padding_tokens / max(1, outcome.computed_tokens),
        slo_attainment=float(kept.mean()) if len(kept) else 0.0,
        goodput=float(kept.sum()) / duration,
        num_steps=outcome.num_steps,
        mean_batch=outcome.sampled_tokens / max(1, outcome.num_steps),
        utilisation=outcome.busy_s / (duration * num_groups),
        wall_s=outcome.wall_s,
    )


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Independent simulations of the same time span as one."""
    if len(outcomes) == 1:
        return outcomes[0]
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for reason, count in outcome.finish_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Outcome(
        arrival_s=np.concatenate([o.arrival_s for o in outcomes]),
        first_s=np.concatenate([o.first_s for o in outcomes]),
        end_s=np.concatenate([o.end_s for o in outcomes]),
        queue_s=np.concatenate([o.queue_s for o in outcomes]),
        output_tokens=np.concatenate([o.output_tokens for o in outcomes]),
        ends=np.concatenate([o.ends for o in outcomes]),
        finish_reasons=reasons,
        refused=sum(o.refused for o in outcomes),
        duration_s=max(o.duration_s for o in outcomes),
        num_steps=sum(o.num_steps for o in outcomes),
        busy_s=sum(o.busy_s for o in outcomes),
        computed_tokens=sum(o.computed_tokens for o in outcomes),
        padding_tokens=sum(o.padding_tokens for o in outcomes),
        sampled_tokens=sum(o.sampled_tokens for o in outcomes),
        gap_s=outcomes[0].gap_s,
        gap_counts=np.sum([o.gap_counts for o in outcomes], axis=0),
        steps=None,
        wall_s=sum(o.wall_s for o in outcomes),
    )


def _weighted_percentile(values: NDArray[np.float64], counts: NDArray[np.int64], percent: float) -> float:
    total = counts.sum()
    if not total:
        return 0.0
    return float(values[np.searchsorted(np.cumsum(counts), total * percent / 100)])

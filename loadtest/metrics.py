"""From what happened to each request to the figures of a run. Times in seconds inside, milliseconds in summaries.

TTFT: sent to first content. TPOT: (E2E - TTFT) / (output tokens - 1). ITL: gaps between content chunks. Goodput:
requests a second that finished and kept every limit of the SLO. Output tokens are those that the server's usage counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)


class RequestRecord(msgspec.Struct):
    """What the client saw of one request; times on the client's clock, 0 is the start of the run."""

    index: int
    due_s: float  # when the arrival process wanted it sent
    sent_s: float
    first_s: float | None = None  # first content
    end_s: float = 0.0
    chunk_times_s: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: str = "failed"  # "ok", "cancelled" (by us) or "failed"
    http_status: int = 0
    error: str = ""
    finish_reason: str = ""
    tenant: str = ""
    queue_s: float | None = None  # where the server tells it

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Slo(msgspec.Struct, frozen=True):
    """Limits in milliseconds; None: no limit. `itl_ms` bounds the mean gap (TPOT) of each request."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=500ms,itl=50ms,e2e=20s`; a bare number is milliseconds."""
        limits: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            key = {"ttft": "ttft_ms", "itl": "itl_ms", "tpot": "itl_ms", "e2e": "e2e_ms"}.get(name.strip())
            number = value.strip().removesuffix("ms")
            scale = 1.0
            if number.endswith("s"):
                number, scale = number[:-1], 1000.0
            try:
                limit = float(number) * scale
            except ValueError:
                limit = -1.0
            if key is None or not 0 < limit < math.inf:
                raise ValueError(f"slo {part!r}: want ttft=, itl= or e2e= and a time above 0, such as ttft=500ms")
            limits[key] = limit
        return cls(**limits)

    def holds(self, record: RequestRecord) -> bool:
        """Whether the request finished and kept every limit."""
        if record.status != "ok" or record.ttft_s is None:
            return False
        seen = ((self.ttft_ms, record.ttft_s), (self.itl_ms, record.tpot_s), (self.e2e_ms, record.e2e_s))
        return all(limit is None or value is None or value * 1e3 <= limit for limit, value in seen)


NO_SLO = Slo()
Stats = dict[str, float]


class Summary(msgspec.Struct):
    """The figures of one run."""

    num_requests: int
    completed: int
    failed: int
    cancelled: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    request_throughput: float
    output_throughput: float  # tokens a second, of completed and cancelled requests
    total_throughput: float
    ttft_ms: Stats
    itl_ms: Stats
    tpot_ms: Stats
    e2e_ms: Stats
    queue_ms: Stats
    send_lag_ms: Stats  # sent after it was due: above a few ms the client was the bottleneck
    slo: Slo
    goodput: float  # requests a second
    slo_attainment: float  # share of all requests not cancelled by us
    errors: dict[str, int]


def stats_ms(values_s: Iterable[float] | NDArray[np.float64]) -> Stats:
    """Mean, percentiles (linear between order statistics) and maximum, in milliseconds; empty without values."""
    values = np.asarray(values_s if isinstance(values_s, np.ndarray) else list(values_s), np.float64) * 1e3
    if not len(values):
        return {}
    cuts = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def summarize(records: Sequence[RequestRecord], slo: Slo) -> Summary:
    """The run's figures. Its duration is from the first request sent to the last answer's end."""
    done = [r for r in records if r.status == "ok"]
    seen = [r for r in records if r.status != "failed"]
    duration = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    per_s = 1.0 / duration if duration > 0 else 0.0
    gaps = [np.diff(r.chunk_times_s) for r in done if len(r.chunk_times_s) > 1]
    good = sum(slo.holds(r) for r in records)
    output_tokens = sum(r.output_tokens for r in seen)
    prompt_tokens = sum(r.prompt_tokens for r in seen)
    errors: dict[str, int] = {}
    for record in records:
        if record.status == "failed":
            errors[record.error] = errors.get(record.error, 0) + 1
    cancelled = len(seen) - len(done)
    return Summary(
        num_requests=len(records),
        completed=len(done),
        failed=len(records) - len(seen),
        cancelled=cancelled,
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(r.cached_tokens for r in seen),
        request_throughput=len(done) * per_s,
        output_throughput=output_tokens * per_s,
        total_throughput=(output_tokens + prompt_tokens) * per_s,
        ttft_ms=stats_ms(r.ttft_s for r in done if r.ttft_s is not None),
        itl_ms=stats_ms(np.concatenate(gaps) if gaps else ()),
        tpot_ms=stats_ms(r.tpot_s for r in done if r.tpot_s is not None),
        e2e_ms=stats_ms(r.e2e_s for r in done),
        queue_ms=stats_ms(r.queue_s for r in done if r.queue_s is not None),
        send_lag_ms=stats_ms(r.sent_s - r.due_s for r in records),
        slo=slo,
        goodput=good * per_s,
        slo_attainment=good / (len(records) - cancelled) if len(records) > cancelled else 0.0,
        errors=errors,
    )

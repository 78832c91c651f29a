"""What a server says about itself over a run: Prometheus counters and histograms before and after, as differences."""

from __future__ import annotations

import re

import msgspec

from orcaserve.loadtest.http_stream import HttpFault, StreamClient
from orcaserve.loadtest.metrics import Stats

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]+)"')
QUEUE_TIME = "vllm:request_queue_time_seconds"
COUNTERS = ("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


class Snapshot(msgspec.Struct):
    """Sums over all label sets of the samples that a report uses."""

    values: dict[str, float] = {}
    queue_buckets: dict[float, float] = {}  # upper bound -> cumulative count


def parse(text: str) -> Snapshot:
    """Read a Prometheus text exposition."""
    snapshot = Snapshot()
    for name, labels, number in _SAMPLE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        snapshot.values[name] = snapshot.values.get(name, 0.0) + value
        bound = _BOUND.search(labels) if name == f"{QUEUE_TIME}_bucket" else None
        if bound:
            limit = float(bound.group(1))
            snapshot.queue_buckets[limit] = snapshot.queue_buckets.get(limit, 0.0) + value
    return snapshot


async def scrape(client: StreamClient) -> Snapshot | None:
    """The server's /metrics; None where it has none."""
    try:
        status, body = await client.get("/metrics")
    except (HttpFault, OSError):
        return None
    return parse(body.decode("utf-8", "replace")) if status == 200 else None


def queue_stats_ms(before: Snapshot, after: Snapshot) -> Stats:
    """Queue wait of the requests between two snapshots; percentiles interpolated within the histogram's buckets."""
    count = after.values.get(f"{QUEUE_TIME}_count", 0.0) - before.values.get(f"{QUEUE_TIME}_count", 0.0)
    if count <= 0:
        return {}
    total = after.values.get(f"{QUEUE_TIME}_sum", 0.0) - before.values.get(f"{QUEUE_TIME}_sum", 0.0)
    stats = {"mean": total / count * 1e3}
    grown = {bound: n - before.queue_buckets.get(bound, 0.0) for bound, n in sorted(after.queue_buckets.items())}
    for percent in (50, 99):
        stats[f"p{percent}"] = _quantile(grown, count * percent / 100) * 1e3
    return stats


def _quantile(cumulative: dict[float, float], rank: float) -> float:
    low, below = 0.0, 0.0
    for bound, count in cumulative.items():
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low


def counters(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """How far the counters moved that a report prints."""
    return {name: after.values[name] - before.values.get(name, 0.0) for name in COUNTERS if name in after.values}

"""The pictures of a report, drawn with matplotlib into PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from orcaserve.loadtest.run import RunResult
from orcaserve.loadtest.steps import StepLog

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")


def png(draw: Callable[[Axes], None], title: str, width: float = 7.0, height: float = 3.8) -> bytes:
    """One axes, drawn by `draw`, as a PNG."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    try:
        axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        return data.getvalue()
    finally:
        plt.close(figure)


def latency_cdf(results: Sequence[RunResult], metric: str) -> bytes | None:
    """Share of requests (of gaps, for itl) at or below a latency; one line a run. None where nothing was measured."""
    series = [(r.label, np.sort(_values_ms(r, metric))) for r in results]
    series = [(label, values) for label, values in series if len(values)]
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for (label, values), color in zip(series, _colors(len(series)), strict=True):
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.step(values, shares, where="post", label=label, color=color, linewidth=1.6)
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("share at or below")
        axes.set_ylim(0, 1.01)
        smallest = min(values[0] for _, values in series)
        if smallest > 0 and max(values[-1] for _, values in series) > 30 * smallest:
            axes.set_xscale("log")
        _legend(axes, len(series))

    names = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2e": "End-to-end latency"}
    return png(draw, names[metric])


def throughput_over_time(results: Sequence[RunResult]) -> bytes:
    """Content chunks received a second, in up to 60 bins."""

    def draw(axes: Axes) -> None:
        for result, color in zip(results, _colors(len(results)), strict=True):
            times = np.concatenate([np.asarray(r.chunk_times_s) for r in result.records] or [np.zeros(0)])
            if not len(times):
                continue
            counts, edges = np.histogram(times, bins=min(60, max(5, len(times) // 20)))
            axes.stairs(counts / np.diff(edges), edges, label=result.label, color=color, linewidth=1.6)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("chunks a second")
        axes.set_ylim(bottom=0)
        _legend(axes, len(results))

    return png(draw, "Streamed chunks over time")


def requests_in_flight(results: Sequence[RunResult]) -> bytes:
    """Requests between their sending and their end."""

    def draw(axes: Axes) -> None:
        for result, color in zip(results, _colors(len(results)), strict=True):
            sent, ends = np.sort([r.sent_s for r in result.records]), np.sort([r.end_s for r in result.records])
            times = np.linspace(0.0, ends[-1], 600) if len(ends) else np.zeros(0)
            running = np.searchsorted(sent, times, "right") - np.searchsorted(ends, times, "right")
            axes.plot(times, running, label=result.label, color=color, linewidth=1.4)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("requests in flight")
        axes.set_ylim(bottom=0)
        _legend(axes, len(results))

    return png(draw, "Requests in flight")


def timeline(result: RunResult, most: int = 80) -> bytes:
    """One bar a request: waiting for the first token, then streaming; a picture of who is served when."""
    records = result.records[:most]

    def draw(axes: Axes) -> None:
        for row, record in enumerate(records):
            first = record.first_s if record.first_s is not None else record.end_s
            axes.barh(row, first - record.sent_s, left=record.sent_s, color="#cbd5e1", height=0.8)
            color = {"ok": COLORS[0], "cancelled": COLORS[1]}.get(record.status, COLORS[4])
            axes.barh(row, record.end_s - first, left=first, color=color, height=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds since the start (grey: until the first token; orange: cancelled; red: failed)")
        axes.set_ylabel("request")

    return png(draw, f"Timeline of requests: {result.label}", height=max(2.5, min(9.0, 0.09 * len(records) + 1.5)))


def load_curve(results: Sequence[RunResult]) -> bytes:
    """Throughput against load, one point a run, with the P99 TTFT on the right-hand axis."""

    def draw(axes: Axes) -> None:
        places = range(len(results))
        axes.plot(
            places, [r.summary.output_throughput for r in results], "o-", color=COLORS[0], label="output tokens/s"
        )
        axes.set_xticks(
            list(places), [r.arrivals.removeprefix("closed loop, ") for r in results], rotation=15, fontsize=8
        )
        axes.set_ylabel("output tokens a second", color=COLORS[0])
        axes.set_ylim(bottom=0)
        other = axes.twinx()
        other.plot(places, [r.summary.ttft_ms.get("p99", np.nan) for r in results], "s--", color=COLORS[1])
        other.set_ylabel("P99 TTFT, ms", color=COLORS[1])
        other.set_ylim(bottom=0)

    return png(draw, "Throughput against load")


def step_timeline(log: StepLog, title: str) -> bytes:
    """Tokens of each step, split in decode, prefill and padding, over the time the step took; gaps are idle time."""
    starts = np.asarray(log.start_s)
    edges = np.stack([starts, np.maximum(starts, starts + np.asarray(log.seconds))], axis=1).ravel()
    edges = np.maximum.accumulate(edges)

    def draw(axes: Axes) -> None:
        below = np.zeros(max(0, len(edges) - 1))
        layers = (
            ("decode", log.decode_tokens, 0),
            ("prefill", log.prefill_tokens, 2),
            ("padding", log.padding_tokens, 4),
        )
        for name, tokens, color in layers:
            heights = np.zeros_like(below)
            heights[::2] = tokens
            if heights.any():
                axes.stairs(below + heights, edges, baseline=below, fill=True, label=name, color=COLORS[color])
            below = below + heights
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("tokens in the step")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False, loc="upper right")

    return png(draw, title)


def _values_ms(result: RunResult, metric: str) -> NDArray[np.float64]:
    done = [r for r in result.records if r.status == "ok"]
    if metric == "itl":
        gaps = [np.diff(r.chunk_times_s) for r in done if len(r.chunk_times_s) > 1]
        return np.concatenate(gaps) * 1e3 if gaps else np.zeros(0)
    values = [r.ttft_s if metric == "ttft" else r.e2e_s for r in done]
    return np.array([v * 1e3 for v in values if v is not None])


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        axes.legend(fontsize=8, frameon=False)

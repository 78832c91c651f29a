"""The study that started it all: static batching against continuous batching, the same load and the same runner.

Four rows, a closed loop of users: request-level batches of 16 and of 32 (padded, run to the longest member),
iteration-level batching with whole prompts, and with chunked prefill. `simulated` takes step times from the model of
`step_time`; `measured` (in `table.py`) runs the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from matplotlib.axes import Axes

from orcaserve.engine.baselines import StaticBatchScheduler
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest import plots, report, workload
from orcaserve.loadtest.arrivals import ClosedLoop
from orcaserve.loadtest.model_shape import ModelShape
from orcaserve.loadtest.outcome import Figures, figures
from orcaserve.loadtest.simulate import Executor, Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import Device, StepTime
from orcaserve.loadtest.steps import StepLog
from orcaserve.loadtest.workload import LoadRequest

# What the study that this project began with printed for Llama-3-70B, TP=4 on H100, 50 users.
PUBLISHED = {
    "static": {"output_throughput": 42.0, "ttft_ms": 1850.0},
    "continuous": {"output_throughput": 480.0, "ttft_ms": 240.0},
    "continuous + chunked prefill": {
        "output_throughput": 525.0,
        "ttft_ms": 210.0,
        "tpot_ms": 18.2,
        "queue_p99_ms": 1700.0,
    },
}


class StudySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The load and the limits, the same for all rows."""

    users: int = 50
    num_requests: int = 1000
    lengths: str = "sharegpt"
    seed: int = 0
    max_num_seqs: int = 64
    chunk_budget: int = 512  # tokens of a step with chunked prefill
    max_model_len: int = 2560
    block_size: int = 16


class Variant(msgspec.Struct, frozen=True):
    """One row: how requests are batched."""

    name: str
    static: bool
    chunked: bool
    batch: int


VARIANTS = (
    Variant("static B=16", True, True, 16),
    Variant("static B=32", True, True, 32),
    Variant("continuous", False, False, 0),
    Variant("continuous + chunked prefill", False, True, 0),
)


class StudyRow(msgspec.Struct):
    """What came out of one variant."""

    variant: Variant
    figures: Figures
    steps: StepLog


def requests(spec: StudySpec) -> list[LoadRequest]:
    return workload.build(workload.WorkloadSpec(spec.num_requests, workload.parse_lengths(spec.lengths), spec.seed))


def scheduler_config(variant: Variant, spec: StudySpec) -> SchedulerConfig:
    """Whole prompts need a budget that holds the longest; batches that chunk get the chunk budget."""
    return SchedulerConfig(
        max_model_len=spec.max_model_len,
        eos_token_ids=(),
        block_size=spec.block_size,
        max_num_seqs=variant.batch or spec.max_num_seqs,
        max_num_batched_tokens=spec.chunk_budget if variant.chunked else spec.max_model_len,
        enable_chunked_prefill=variant.chunked,
        enable_prefix_caching=False,
        max_queued_requests=max(1024, spec.num_requests),
    )


def run_variant(
    variant: Variant,
    spec: StudySpec,
    num_blocks: int,
    executor: Executor,
    load: Sequence[LoadRequest],
    prompt_ids: Callable[[LoadRequest], Sequence[int]] | None = None,
    host_clock: Callable[[], float] | None = None,
) -> StudyRow:
    """One row, on a step-time model or (with `host_clock`) on real workers."""
    config = scheduler_config(variant, spec)
    scheduler = StaticBatchScheduler(config) if variant.static else Scheduler(config)
    scheduler.add_group(0, num_blocks)
    outcome = Simulation(
        scheduler,
        {0: executor},
        load,
        ClosedLoop(spec.users),
        prompt_ids=prompt_ids,
        steps_ahead=config.max_steps_in_flight - 1,
        arrive_together=True,
        keep_steps=True,
        host_clock=host_clock,
        num_padding=(lambda: scheduler.stats().padding_tokens) if variant.static else None,
    ).run()
    assert outcome.steps is not None
    return StudyRow(variant, figures(outcome, 1), outcome.steps)


def simulated(shape: ModelShape, device: Device, tensor_parallel_size: int, spec: StudySpec) -> list[StudyRow]:
    """All rows on the virtual clock. Raises ValueError where the model does not fit the devices."""
    num_blocks = shape.num_kv_blocks(device.memory_bytes, tensor_parallel_size, spec.block_size, 0.9)
    if num_blocks * spec.block_size < spec.max_model_len:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size}: {num_blocks * spec.block_size} KV tokens fit beside the "
            f"weights of {shape.name} on {device.name}, {spec.max_model_len} are needed"
        )
    step_time = StepTime(shape, device, tensor_parallel_size)
    load = requests(spec)
    return [
        run_variant(v, spec, num_blocks, VirtualWorkers(step_time, v.batch or spec.max_num_seqs), load)
        for v in VARIANTS
    ]


COLUMNS: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
    ("output tok/s", lambda f: f.output_throughput, "{:,.1f}"),
    ("TTFT mean ms", lambda f: f.ttft_ms["mean"], "{:,.0f}"),
    ("TPOT mean ms", lambda f: f.tpot_ms["mean"], "{:,.1f}"),
    ("padding", lambda f: f.padding_share, "{:.1%}"),
    ("queue mean ms", lambda f: f.queue_ms["mean"], "{:,.0f}"),
    ("queue P99 ms", lambda f: f.queue_ms["p99"], "{:,.0f}"),
    ("ITL P99 ms", lambda f: f.itl_p99_ms, "{:,.1f}"),
)


def as_table(rows: Sequence[StudyRow]) -> list[list[str]]:
    """For printing; the last column is the throughput against the first row."""
    table = [["", *(name for name, _, _ in COLUMNS), f"x {rows[0].variant.name}"]]
    base = rows[0].figures.output_throughput
    for row in rows:
        cells = [form.format(read(row.figures)) for _, read, form in COLUMNS]
        table.append([row.variant.name, *cells, f"{row.figures.output_throughput / base:.2f}x"])
    return table


def as_dict(rows: Sequence[StudyRow]) -> dict[str, dict[str, float]]:
    """For JSON: variant -> figures."""
    names = (
        "output_throughput",
        "ttft_mean_ms",
        "tpot_mean_ms",
        "padding_share",
        "queue_mean_ms",
        "queue_p99_ms",
        "itl_p99_ms",
    )
    return {
        row.variant.name: {name: read(row.figures) for name, (_, read, _) in zip(names, COLUMNS, strict=True)}
        for row in rows
    }


def pictures(rows: Sequence[StudyRow]) -> dict[str, bytes]:
    """Bars of the main figures, and what each step computed in the first seconds of each row."""
    drawn = {"bars": _bars(rows)}
    span = min(float(np.sum(row.steps.seconds)) for row in rows) / 4
    for number, row in enumerate(rows):
        drawn[f"steps_{number}"] = plots.step_timeline(
            _until(row.steps, span), f"Tokens of each step: {row.variant.name}"
        )
    return drawn


def write_report(
    rows: Sequence[StudyRow],
    folder: Path,
    title: str,
    more_tables: Sequence[str] = (),
    more_pictures: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """study.html and the PNGs."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {**pictures(rows), **more_pictures}
    for name, data in images.items():
        (folder / f"{name}.png").write_bytes(data)
    head, *body = as_table(rows)
    tables = [report.table("Four ways to batch", head, body), *more_tables]
    return report.write_page(folder / "study.html", title, tables, images)


def _bars(rows: Sequence[StudyRow]) -> bytes:
    labels = [row.variant.name.replace(" + ", "\n+ ") for row in rows]

    def draw(axes: Axes) -> None:
        values = [row.figures.output_throughput for row in rows]
        bars = axes.bar(
            labels, values, color=[plots.COLORS[7], plots.COLORS[7], plots.COLORS[0], plots.COLORS[2]], width=0.6
        )
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
        axes.set_ylabel("output tokens a second")
        axes.tick_params(axis="x", labelsize=8)

    return plots.png(draw, "Output throughput")


def _until(log: StepLog, span_s: float) -> StepLog:
    count = int(np.searchsorted(log.start_s, span_s))
    return StepLog(**{name: getattr(log, name)[:count] for name in StepLog.__struct_fields__})

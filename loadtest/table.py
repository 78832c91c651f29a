"""The study measured: the real model in this process, one rank, the same schedulers and the same runner.

The clock advances by what each step and each scheduling call really takes, so 50 users cost no 50 clients. The steps
of the chunked row then calibrate the step-time model, which has to predict the other rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from orcaserve.engine.messages import StepPlan, StepResult
from orcaserve.loadtest import report, study
from orcaserve.loadtest.calibration import Server, picture
from orcaserve.loadtest.model_shape import ModelShape, load_shape
from orcaserve.loadtest.prompts import PromptMaker
from orcaserve.loadtest.simulate import PlanMeter, VirtualWorkers
from orcaserve.loadtest.step_time import CPU, Device, StepTime, calibrate, predicted
from orcaserve.loadtest.steps import StepWork
from orcaserve.loadtest.study import StudyRow, StudySpec
from orcaserve.workers.config import DType, WorkerConfig
from orcaserve.workers.worker import Worker


class MeasuredWorker:
    """One real rank; a step takes what it takes."""

    def __init__(self, worker: Worker, num_slots: int) -> None:
        self._worker = worker
        self._meter = PlanMeter(num_slots)

    def step(self, plan: StepPlan) -> tuple[StepResult, StepWork]:
        work = self._meter.measure(plan)
        began = time.perf_counter()
        result = self._worker.step(plan)
        work.seconds = time.perf_counter() - began
        assert result is not None
        return result, work


class Measured(msgspec.Struct):
    """The rows, and how far the calibrated model is from them."""

    rows: list[StudyRow]
    modelled: list[StudyRow]
    shape: ModelShape
    device: Device
    step_deviation: dict[str, float]  # variant -> median |model / measured - 1| of its steps


def load_worker(model_dir: Path, spec: StudySpec, dtype: DType = "auto", num_threads: int = 0) -> tuple[Worker, int]:
    """A loaded and warmed-up worker, and its KV blocks: enough for all users at once."""
    config = WorkerConfig(
        model_dir=str(model_dir),
        dtype=dtype,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_model_len,
        block_size=spec.block_size,
        num_threads=num_threads,
    )
    worker = Worker(config, 0, "tcp://127.0.0.1:0")
    worker.load()
    wanted = spec.max_num_seqs * -(-spec.max_model_len // spec.block_size)
    num_blocks = min(worker.num_kv_blocks(), wanted)
    worker.allocate(num_blocks)
    worker.warm_up()
    return worker, num_blocks


def measure(
    model_dir: Path,
    spec: StudySpec,
    num_threads: int = 0,
    on_row: Callable[[StudyRow], None] = lambda _row: None,
) -> Measured:
    """All four rows on the real model, then on the model of its steps."""
    worker, num_blocks = load_worker(model_dir, spec, num_threads=num_threads)
    load = study.requests(spec)
    prompts = PromptMaker(spec.seed)
    rows = []
    for variant in study.VARIANTS:
        worker.reset()
        executor = MeasuredWorker(worker, spec.max_num_seqs)
        rows.append(study.run_variant(variant, spec, num_blocks, executor, load, prompts.ids, time.perf_counter))
        on_row(rows[-1])
    worker.close()
    shape = load_shape(str(model_dir))
    device = calibrate(shape, CPU, 1, rows[-1].steps)
    step_time = StepTime(shape, device, 1)
    modelled = [
        study.run_variant(v, spec, num_blocks, VirtualWorkers(step_time, spec.max_num_seqs), load)
        for v in study.VARIANTS
    ]
    deviation = {
        row.variant.name: float(
            np.median(np.abs(predicted(shape, device, 1, row.steps) / np.array(row.steps.seconds) - 1))
        )
        for row in rows
    }
    return Measured(rows, modelled, shape, device, deviation)


def comparison(found: Measured) -> list[list[str]]:
    """Model against measurement, for printing."""
    table = [["model / measured", "output tok/s", "TTFT mean", "TPOT mean", "a step (median deviation)"]]
    for real, model in zip(found.rows, found.modelled, strict=True):
        table.append(
            [
                real.variant.name,
                f"{model.figures.output_throughput / real.figures.output_throughput:.2f}x",
                f"{model.figures.ttft_ms['mean'] / real.figures.ttft_ms['mean']:.2f}x",
                f"{model.figures.tpot_ms['mean'] / real.figures.tpot_ms['mean']:.2f}x",
                f"{found.step_deviation[real.variant.name]:.1%}",
            ]
        )
    return table


def write_report(found: Measured, folder: Path, title: str) -> Path:
    """The study's report with the model beside it: ratios, and each step that it was fitted to and that it was not."""
    head, *body = comparison(found)
    server = Server(shape=found.shape)
    return study.write_report(
        found.rows,
        folder,
        title,
        [report.table("The calibrated step-time model", head, body)],
        {f"model_{i}": picture(server, found.device, row.steps, row.variant.name) for i, row in enumerate(found.rows)},
    )

"""The step-time model against a server that runs: learn from a trace of its steps, then predict a load test of it.

`orcaserve trace` has every step with its slots; here they become a StepLog, with the contexts followed from step to
step. What a step takes there is the time from one result to the next, so the scheduler, the channel and the way back
are in it where they are not hidden. What the model leaves out lies before the scheduler: HTTP, tokenizer, client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.axes import Axes

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest import plots
from orcaserve.loadtest.arrivals import ClosedLoop
from orcaserve.loadtest.model_shape import ModelShape
from orcaserve.loadtest.outcome import Figures, figures
from orcaserve.loadtest.run import RunResult
from orcaserve.loadtest.simulate import Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import Device, StepTime
from orcaserve.loadtest.steps import StepLog, StepWork
from orcaserve.loadtest.workload import LoadRequest


class TracedStep(msgspec.Struct):
    """What a trace says of a plan."""

    step: int
    prefill: list[tuple[int, int]]  # slot, tokens
    decodes: list[int]  # slots
    step_s: float


def read_traces(paths: Sequence[Path]) -> StepLog:
    """The steps of all of them: a log of one load says little of another one."""
    logs = [read_trace(path) for path in paths]
    return StepLog(**{name: [x for log in logs for x in getattr(log, name)] for name in StepLog.__struct_fields__})


def read_trace(path: Path, group: int = 0) -> StepLog:
    """The steps of one group whose contexts are known: those after each of their slots was seen to start."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        plans = [e for e in events if e["ph"] == "X" and e["name"] == "plan" and e["tid"] == group]
        steps = [(e["ts"] / 1e6, msgspec.convert(e["args"], TracedStep)) for e in plans]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"trace {path}: not a trace that `orcaserve trace` wrote: {error}") from error
    return follow(steps)


def follow(steps: Sequence[tuple[float, TracedStep]]) -> StepLog:
    """(start, step) in the order of planning -> the log."""
    contexts: dict[int, int] = {}
    prefilled: dict[int, StepWork] = {}  # slot -> the step of its last chunk, as long as it has not decoded
    works: list[tuple[float, StepWork, bool]] = []
    for start_s, step in sorted(steps, key=lambda timed: timed[1].step):
        work = StepWork(step.step_s, 0, len(step.decodes), 0, len(step.decodes), 0, 0)
        for slot, num_tokens in step.prefill:
            context = contexts[slot] if slot in prefilled else 0
            work.prefill_tokens += num_tokens
            work.prefill_pairs += num_tokens * context + num_tokens * (num_tokens + 1) // 2
            contexts[slot] = context + num_tokens
            work.kv_tokens += contexts[slot]
            prefilled[slot] = work
        known = all(slot in contexts for slot in step.decodes)
        for slot in step.decodes:
            if slot in prefilled:
                prefilled.pop(slot).rows += 1  # the chunk was the last one, so it sampled
            if slot in contexts:
                contexts[slot] += 1
                work.kv_tokens += contexts[slot]
        works.append((start_s, work, known and step.step_s > 0 and work.tokens > 0))
    log = StepLog()
    for start_s, work, usable in works:
        if usable:
            log.add(start_s, work)
    return log


class Comparison(msgspec.Struct):
    """A load test and its simulation."""

    users: int
    measured: dict[str, float]
    simulated: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        return {name: self.simulated[name] / value for name, value in self.measured.items() if value}


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What was served, as far as steps depend on it."""

    shape: ModelShape
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def step_time(self, device: Device) -> StepTime:
        return StepTime(self.shape, device, self.tensor_parallel_size)


def simulate_run(server: Server, device: Device, run: RunResult) -> Comparison:
    """The requests of a closed-loop run on the virtual clock, with the same number of users."""
    found = re.fullmatch(r"closed loop, (\d+) users", run.arrivals)
    if found is None:
        raise ValueError(f"run {run.label!r}: {run.arrivals!r} is not a closed loop")
    users = int(found[1])
    done = [record for record in run.records if record.status == "ok"]
    load = [LoadRequest(i, record.prompt_tokens, record.output_tokens) for i, record in enumerate(done)]
    longest = max((r.prompt_tokens + r.output_tokens for r in load), default=1)
    config = SchedulerConfig(
        max_model_len=longest,
        eos_token_ids=(),
        max_num_seqs=server.max_num_seqs,
        max_num_batched_tokens=server.max_num_batched_tokens,
        enable_prefix_caching=False,
        max_queued_requests=max(1024, users),
    )
    scheduler = Scheduler(config)
    scheduler.add_group(0, 2 * server.max_num_seqs * -(-longest // config.block_size))
    workers = VirtualWorkers(server.step_time(device), server.max_num_seqs)
    ahead = config.max_steps_in_flight - 1
    outcome = Simulation(scheduler, {0: workers}, load, ClosedLoop(users), steps_ahead=ahead).run()
    return Comparison(users, _measured(run), _simulated(figures(outcome, 1)))


def _measured(run: RunResult) -> dict[str, float]:
    s = run.summary
    return {
        "output tokens/s": s.output_throughput,
        "TTFT mean ms": s.ttft_ms["mean"],
        "TPOT mean ms": s.tpot_ms["mean"],
        "E2E mean ms": s.e2e_ms["mean"],
    }


def _simulated(f: Figures) -> dict[str, float]:
    return {
        "output tokens/s": f.output_throughput,
        "TTFT mean ms": f.ttft_ms["mean"],
        "TPOT mean ms": f.tpot_ms["mean"],
        "E2E mean ms": f.e2e_ms["mean"],
    }


def deviation(server: Server, device: Device, log: StepLog) -> dict[str, float]:
    """|model / measured - 1| of the steps, median and 90th percentile; and of the sum of all, signed."""
    model, real = server.step_time(device).all_seconds(log), np.asarray(log.seconds)
    off = np.abs(model / real - 1)
    return {
        "median": float(np.median(off)),
        "p90": float(np.percentile(off, 90)),
        "sum": float(model.sum() / real.sum() - 1),
    }


def as_table(off: dict[str, float], compared: Sequence[Comparison]) -> list[list[str]]:
    """How far the steps are off, then runs simulated and measured side by side."""
    table = [["", "measured", "simulated", "simulated / measured"]]
    steps = f"off by {off['median']:.1%} in the median, {off['p90']:.1%} at p90"
    table.append(["steps", steps, "", f"{1 + off['sum']:.2f}x"])
    for each in compared:
        for name, ratio in each.ratios.items():
            label = f"{each.users} in flight: {name}"
            table.append([label, f"{each.measured[name]:,.1f}", f"{each.simulated[name]:,.1f}", f"{ratio:.2f}x"])
    return table


def picture(server: Server, device: Device, log: StepLog, name: str) -> bytes:
    """Each step: what the model says against what it took; on the line both are the same."""

    def draw(axes: Axes) -> None:
        model, real = server.step_time(device).all_seconds(log) * 1e3, np.asarray(log.seconds) * 1e3
        chunked = np.asarray(log.prefill_tokens) > 0
        for kind, chosen, color in (
            ("decodes only", ~chunked, plots.COLORS[0]),
            ("with prefill", chunked, plots.COLORS[2]),
        ):
            if chosen.any():
                axes.plot(real[chosen], model[chosen], ".", ms=4, alpha=0.5, color=color, label=kind)
        ends = [min(real.min(), model.min()), max(real.max(), model.max())]
        axes.plot(ends, ends, color="#64748b", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured step, ms")
        axes.set_ylabel("model, ms")
        axes.legend(fontsize=8, frameon=False)

    return plots.png(draw, f"Step times, model against measurement: {name}")

"""From the options of the command line to runs: the workload, its arrivals, a warm-up, and the run itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.console import Console

from orcaserve.loadtest import live, workload
from orcaserve.loadtest.arrivals import Arrivals, ClosedLoop, OpenLoop, Times, constant, gamma, replay
from orcaserve.loadtest.run import Generator, Progress, RunConfig, RunResult
from orcaserve.loadtest.trace import approximate_tokens, read_trace
from orcaserve.loadtest.workload import BadWorkload, LoadRequest, WorkloadSpec

ArrivalKind = Literal["poisson", "constant", "replay"]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send and when; the names are those of the command line."""

    num_requests: int
    lengths: str = "fixed:128,64"
    trace: Path | None = None
    tokenizer: Path | None = None  # counts the tokens of a ShareGPT file; else four characters a token
    max_model_len: int = 0
    seed: int = 0
    num_prefixes: int = 0
    prefix_tokens: int = 0
    turns: int = 1
    tenants: tuple[str, ...] = ()
    cancel_share: float = 0.0
    arrivals: ArrivalKind = "poisson"
    burstiness: float = 1.0
    speed: float = 1.0  # of a replayed trace
    think_s: float = 0.0
    warm_up: int = 0


class Load(msgspec.Struct):
    """Requests and, for a trace with timestamps, when they came."""

    requests: list[LoadRequest]
    times_s: list[float] | None


def build_load(options: LoadOptions) -> Load:
    """From a trace file where one is named, else from the length samplers."""
    if options.trace is None:
        spec = WorkloadSpec(
            options.num_requests,
            workload.parse_lengths(options.lengths),
            options.seed,
            options.num_prefixes,
            options.prefix_tokens,
            options.turns,
            options.tenants,
            options.cancel_share,
        )
        return Load(workload.build(spec), None)
    count = approximate_tokens
    if options.tokenizer is not None:
        from orcaserve.cluster.text import TextCodec

        codec = TextCodec.from_file(str(options.tokenizer / "tokenizer.json"))

        def count(text: str) -> int:
            return len(codec.encode_now([text], add_special_tokens=False)[0])

    rows = read_trace(options.trace, options.num_requests, count)
    times = [row.at_s for row in rows if row.at_s is not None]
    requests = workload.from_trace(rows, max_tokens=options.max_model_len)
    return Load(requests, times if len(times) == len(rows) else None)


def build_arrivals(options: LoadOptions, load: Load, rate: float | None, concurrency: int | None) -> Arrivals:
    """A closed loop for `concurrency`; otherwise an open loop at `rate`, or the trace's own times."""
    if concurrency is not None:
        return ClosedLoop(concurrency, options.think_s)
    if options.arrivals == "replay" or (rate is None and load.times_s is not None):
        if load.times_s is None:
            raise BadWorkload("arrivals=replay needs a trace with timestamps (BurstGPT or Azure)")
        return replay(np.array(load.times_s), options.speed)
    if rate is None:
        return OpenLoop(np.zeros(len(load.requests)))
    if options.arrivals == "constant":
        return constant(len(load.requests), rate)
    return gamma(len(load.requests), rate, options.burstiness, np.random.default_rng((options.seed, 3)))


async def run_once(
    config: RunConfig,
    options: LoadOptions,
    load: Load,
    console: Console,
    rate: float | None = None,
    concurrency: int | None = None,
) -> RunResult:
    """Warm up, then one run with its live progress."""
    if options.warm_up:
        warm = [msgspec.structs.replace(config, seed=config.seed + 10_000)]
        requests = [r for r in load.requests if r.session < 0][: options.warm_up] or load.requests[: options.warm_up]
        await Generator(warm[0], Progress(len(requests))).run(requests, ClosedLoop(min(8, len(requests))))
    progress = Progress(len(load.requests))
    generator = Generator(config, progress)
    async with live.shown(progress, console, config.label or config.base_url):
        return await generator.run(load.requests, build_arrivals(options, load, rate, concurrency))


def trace_times(load: Load, rate: float, seed: int) -> Times:
    """Arrival times for a simulation: the trace's own, sped up to `rate` where it is above 0; else Poisson."""
    if load.times_s is not None:
        times = replay(np.array(load.times_s)).times_s
        return times * (len(times) / times[-1] / rate) if rate > 0 and times[-1] > 0 else times
    if rate <= 0:
        raise BadWorkload(f"rate must be above 0 where no trace gives the times, got {rate}")
    return gamma(len(load.requests), rate, 1.0, np.random.default_rng((seed, 3))).times_s

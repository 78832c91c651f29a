"""`orcaserve simulate`: everything that runs on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orcaserve.cluster.cli_types import number

simulate_app = typer.Typer(help="The scheduler on a virtual clock: demonstration, four-row study, capacity planning.")

ModelName = Annotated[str, typer.Option(help="llama-3-70b, llama-3-8b, a config.json or a model folder.")]
Gpu = Annotated[str, typer.Option(help="h100, h200, a100, cpu, or a file from `calibrate`.")]


@simulate_app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    trace: Annotated[bool, typer.Option("--trace", help="Print the classic demonstration step by step.")] = False,
) -> None:
    """Run the scheduler without a model, on a virtual clock."""
    if context.invoked_subcommand is not None:
        return
    if not trace:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    from orcaserve.loadtest import demonstration
    from orcaserve.loadtest.output import print_json

    shown = demonstration.run()
    typer.echo(demonstration.as_text(shown))
    print_json(demonstration.totals(shown))


@simulate_app.command()
def table(
    model: ModelName = "llama-3-70b",
    gpu: Gpu = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 4,
    users: Annotated[int, typer.Option(min=1, help="Closed loop: each has one request in flight.")] = 50,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1)] = 1000,
    lengths: Annotated[str, typer.Option()] = "sharegpt",
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("out/simulate-table"),
) -> None:
    """Static batching against continuous batching: throughput, latencies, queue wait, padding."""
    from orcaserve.loadtest import study
    from orcaserve.loadtest.model_shape import load_shape
    from orcaserve.loadtest.output import console, print_json, print_table, refusals
    from orcaserve.loadtest.step_time import find_device

    with refusals():
        spec = study.StudySpec(users=users, num_requests=num_requests, lengths=lengths, seed=seed)
        rows = study.simulated(load_shape(model), find_device(gpu), tensor_parallel_size, spec)
        title = f"{model}, TP={tensor_parallel_size} on {gpu}, {users} users, virtual clock"
        print_table(title, study.as_table(rows))
        page = study.write_report(rows, out, title)
        console.print(f"report: {page}")
    print_json(study.as_dict(rows))


@simulate_app.command()
def plan(
    model: ModelName = "llama-3-70b",
    gpu: Gpu = "h100",
    slo: Annotated[str, typer.Option(help="Limits such as ttft=500ms,itl=50ms.")] = "ttft=500ms,itl=50ms",
    attainment: Annotated[float, number("Share of requests that must keep the SLO.", 0, 1)] = 0.99,
    trace: Annotated[Path | None, typer.Option(help="BurstGPT, Azure LLM or ShareGPT file.")] = None,
    rate: Annotated[float, number("Requests a second; a trace with times is sped up to it.")] = 0.0,
    lengths: Annotated[str, typer.Option(help="Without a trace.")] = "sharegpt",
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1)] = 5000,
    tp: Annotated[str, typer.Option(help="TP sizes to try.")] = "1,2,4,8",
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    max_model_len: Annotated[int, typer.Option(min=2)] = 8192,
    gpu_memory_utilization: Annotated[float, number(least=0.01, most=1)] = 0.9,
    max_groups: Annotated[int, typer.Option(min=1)] = 1024,
    processes: Annotated[int, typer.Option(min=1, help="Cores to simulate on.")] = 2,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("out/plan"),
) -> None:
    """How many groups of which TP size keep the SLO, found by simulating them."""
    import numpy as np

    from orcaserve.loadtest import fleet as fleets
    from orcaserve.loadtest import plan as planning
    from orcaserve.loadtest import report
    from orcaserve.loadtest.metrics import Slo
    from orcaserve.loadtest.model_shape import load_shape
    from orcaserve.loadtest.output import console, numbers, print_json, print_table, refusals
    from orcaserve.loadtest.session import LoadOptions, build_load, trace_times
    from orcaserve.loadtest.step_time import find_device

    with refusals():
        load = build_load(LoadOptions(num_requests=num_requests, lengths=lengths, trace=trace, seed=seed))
        times = trace_times(load, rate, seed)
        fleet = fleets.Fleet(
            shape=load_shape(model),
            device=find_device(gpu),
            tensor_parallel_size=1,
            num_groups=1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        found = planning.plan(
            fleet,
            tuple(numbers("tp", tp)),
            times,
            np.array([r.prompt_tokens for r in load.requests]),
            np.array([r.output_tokens for r in load.requests]),
            Slo.parse(slo),
            attainment,
            max_groups,
            processes,
            lambda t: console.print(
                f"TP={t.tensor_parallel_size} x {t.num_groups}: SLO kept by {t.figures.slo_attainment:.2%}"
            ),
        )
        title = f"{model} on {gpu}: {len(load.requests)} requests, {len(times) / max(times[-1], 1e-9):.1f}/s, {slo}"
        rows = planning.rows(found)
        print_table(title, rows)
        picture = planning.picture(found, title)
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.png").write_bytes(picture)
        page = report.write_page(
            out / "plan.html", title, [report.table("Smallest fleets", rows[0], rows[1:])], {"plan": picture}
        )
        console.print(f"report: {page}")
    best = found.best
    print_json(
        {
            "best": None
            if best is None
            else {"tensor_parallel_size": best.tensor_parallel_size, "groups": best.num_groups, "gpus": best.num_gpus},
            "smallest": {str(size): trial for size, trial in found.smallest.items()},
            "too_small": {str(size): why for size, why in found.too_small.items()},
        }
    )


@simulate_app.command()
def fleet(
    model: ModelName = "llama-3-70b",
    gpu: Gpu = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 4,
    groups: Annotated[int, typer.Option(min=1)] = 1000,
    rate: Annotated[float, number("Requests a second of the whole fleet.")] = 4000.0,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1)] = 1_000_000,
    lengths: Annotated[str, typer.Option()] = "sharegpt",
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    slo: Annotated[str, typer.Option(help="Limits such as ttft=500ms,itl=50ms.")] = "ttft=500ms,itl=50ms",
    processes: Annotated[int, typer.Option(min=1, help="Cores to simulate on.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """One large fleet under one load: latencies, SLO, and what it took to simulate them."""
    import resource
    import time

    import numpy as np

    from orcaserve.loadtest.arrivals import poisson
    from orcaserve.loadtest.fleet import Fleet, fit_lengths, run_fleet
    from orcaserve.loadtest.metrics import Slo
    from orcaserve.loadtest.model_shape import load_shape
    from orcaserve.loadtest.outcome import figures
    from orcaserve.loadtest.output import console, print_json, refusals
    from orcaserve.loadtest.step_time import find_device
    from orcaserve.loadtest.workload import parse_lengths

    with refusals():
        rng = np.random.default_rng(seed)
        whole = Fleet(
            shape=load_shape(model),
            device=find_device(gpu),
            tensor_parallel_size=tensor_parallel_size,
            num_groups=groups,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        prompt, output = fit_lengths(*parse_lengths(lengths)(num_requests, rng), whole.max_model_len)
        if whole.num_kv_blocks * whole.block_size < int((prompt + output).max()):
            raise ValueError(
                f"tensor_parallel_size {tensor_parallel_size}: {whole.num_kv_blocks * whole.block_size} KV tokens fit "
                f"beside the weights of {model} on {gpu}, {int((prompt + output).max())} are needed"
            )
        limits = Slo.parse(slo)
        times = poisson(num_requests, rate, rng).times_s
        began = time.perf_counter()
        outcome = run_fleet(
            whole,
            times,
            prompt,
            output,
            processes,
            lambda done, of: console.print(f"cell {done} of {of}: {time.perf_counter() - began:,.0f} s"),
        )
        took_s = time.perf_counter() - began
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print_json(
        {
            "figures": figures(outcome, groups, limits),
            "wall_s": took_s,
            "cpu_s": sum(used.ru_utime + used.ru_stime for used in usage),
            "most_memory_mb": max(used.ru_maxrss for used in usage) / 1024,
        }
    )


@simulate_app.command()
def calibrate(
    traces: Annotated[
        list[Path], typer.Argument(help="What `orcaserve trace` wrote, under few and under many streams.")
    ],
    model: Annotated[
        str, typer.Option(help="smollm2-135m or a model folder: the one that was served.")
    ] = "smollm2-135m",
    gpu: Gpu = "cpu",
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    against: Annotated[
        list[Path] | None, typer.Option(help="results.json of closed-loop load tests of that server; repeatable.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As served.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="As served.")] = 512,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("out/calibration"),
) -> None:
    """Fit the step-time model to a running server, and see how far it is from load tests of it."""
    import msgspec

    from orcaserve.loadtest import calibration, report
    from orcaserve.loadtest.model_shape import load_shape
    from orcaserve.loadtest.output import console, model_folder, print_json, print_table, refusals
    from orcaserve.loadtest.step_time import calibrate as fit
    from orcaserve.loadtest.step_time import find_device

    with refusals():
        log = calibration.read_traces(traces)
        runs = [run for path in against or () for run in report.read_json(path)]
        server = calibration.Server(
            shape=load_shape(str(model_folder(model))),
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        device = fit(server.shape, find_device(gpu), tensor_parallel_size, log)
        compared = [calibration.simulate_run(server, device, run) for run in runs]
        out.mkdir(parents=True, exist_ok=True)
        (out / "device.json").write_bytes(msgspec.json.format(msgspec.json.encode(device), indent=1))
        off = calibration.deviation(server, device, log)
        picture = calibration.picture(server, device, log, server.shape.name)
        (out / "steps.png").write_bytes(picture)
        rows = calibration.as_table(off, compared)
        title = f"{server.shape.name}: the step-time model against {len(log)} steps and {len(runs)} load tests"
        print_table(title, rows)
        page = report.write_page(
            out / "calibration.html",
            title,
            [report.table("Model against measurement", rows[0], rows[1:])],
            {"steps": picture},
        )
        console.print(f"report: {page}; for --gpu: {out / 'device.json'}")
    print_json({"device": device, "steps": off, "runs": [each.ratios for each in compared]})


@simulate_app.command()
def day(
    model: ModelName = "llama-3-70b",
    gpu: Gpu = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 4,
    rate: Annotated[float, number("Requests a second, the day's mean.")] = 6.0,
    hours: Annotated[float, number("Length of the pressed day.", 0.01)] = 1.0,
    swing: Annotated[float, number("The rate is the mean times 1 - swing to 1 + swing.", 0, 1)] = 0.9,
    lengths: Annotated[str, typer.Option()] = "sharegpt",
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 16,
    min_groups: Annotated[int, typer.Option(min=0)] = 1,
    max_groups: Annotated[int, typer.Option(min=1)] = 16,
    start_s: Annotated[float, number("Seconds until a new group serves.", 0)] = 60.0,
    downscale_delay_s: Annotated[float, number(least=0)] = 120.0,
    slo: Annotated[str, typer.Option(help="Limits, such as ttft=1s,itl=50ms.")] = "ttft=2s",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Autoscaling against fixed fleets over a day: group-hours and SLO."""
    from orcaserve.cluster.autoscaling import ScalingRules
    from orcaserve.loadtest import day as days
    from orcaserve.loadtest.fleet import Fleet
    from orcaserve.loadtest.metrics import Slo
    from orcaserve.loadtest.model_shape import load_shape
    from orcaserve.loadtest.output import print_json, print_table, refusals
    from orcaserve.loadtest.session import LoadOptions, build_load
    from orcaserve.loadtest.step_time import find_device

    with refusals():
        if min_groups > max_groups:
            raise ValueError(f"min-groups: {min_groups} is more than max-groups ({max_groups})")
        limits = Slo.parse(slo)
        spec = days.DaySpec(mean_rate=rate, hours=hours, swing=swing, start_s=start_s, seed=seed)
        requests = build_load(LoadOptions(num_requests=spec.num_requests, lengths=lengths, seed=seed)).requests
        fleet = Fleet(
            shape=load_shape(model),
            device=find_device(gpu),
            tensor_parallel_size=tensor_parallel_size,
            num_groups=max_groups,
            max_num_seqs=max_num_seqs,
        )
        rules = ScalingRules(
            min_groups=min_groups,
            max_groups=max_groups,
            ttft_target_s=(limits.ttft_ms or 2000.0) / 1000,
            downscale_delay_s=downscale_delay_s,
            lookahead_s=start_s,
        )
        found = days.compare(fleet, spec, requests, rules, limits)
        title = f"{model}, TP={tensor_parallel_size} on {gpu}, {rate:g} requests/s on average over {hours:g} h, {slo}"
        print_table(title, days.as_table(found))
    print_json(found)

"""`orcaserve loadtest ...` and `orcaserve simulate ...`: options in, runs and reports out. Imports are light."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from orcaserve.cluster.cli_types import number
from orcaserve.loadtest.cli_simulate import simulate_app

__all__ = ["loadtest_app", "simulate_app"]

loadtest_app = typer.Typer(no_args_is_help=True, help="Load generator, comparisons, and measurements of the whole.")

Model = Annotated[str, typer.Option(help="Served name; empty: the first that the server lists.")]
ApiName = Annotated[Literal["chat", "completions"], typer.Option(help="completions sends exact token ids, chat words.")]
ApiKey = Annotated[str, typer.Option(envvar="ORCASERVE_API_KEY", help="Bearer key.")]
NumRequests = Annotated[int, typer.Option("--num-requests", "-n", min=1)]
LengthSpec = Annotated[str, typer.Option(help="sharegpt, sharegpt-small, fixed:IN,OUT or uniform:LOW-HIGH,LOW-HIGH.")]
TraceFile = Annotated[Path | None, typer.Option(help="ShareGPT JSON, BurstGPT CSV or Azure LLM CSV.")]
Concurrency = Annotated[str, typer.Option(help="Closed loop: users; a list such as 1,16,64 makes a run of each.")]
Seed = Annotated[int, typer.Option()]
SloText = Annotated[str, typer.Option("--slo", help="Limits for goodput, such as ttft=500ms,itl=50ms.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests sent beforehand and not counted.")]
OutDir = Annotated[Path, typer.Option("--out", "-o", help="Folder for results.json, report.html and PNGs.")]


@loadtest_app.command()
def run(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://127.0.0.1:8000.")],
    model: Model = "",
    api: ApiName = "completions",
    api_key: ApiKey = "",
    num_requests: NumRequests = 100,
    lengths: LengthSpec = "fixed:128,64",
    trace: TraceFile = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder whose tokenizer counts a ShareGPT file.")] = None,
    max_model_len: Annotated[
        int, typer.Option(min=0, help="Cut a trace's requests to this many tokens; 0: do not.")
    ] = 0,
    concurrency: Concurrency = "",
    rate: Annotated[str, typer.Option(help="Open loop: requests a second; a list makes a run of each.")] = "",
    arrivals: Annotated[Literal["poisson", "constant", "replay"], typer.Option()] = "poisson",
    burstiness: Annotated[float, number("Shape of the gaps' gamma distribution; 1 is Poisson.", 0.01)] = 1.0,
    speed: Annotated[float, number("Replay a trace this many times as fast.", 0.001)] = 1.0,
    think: Annotated[float, number("Closed loop: seconds between an answer and the next request.", 0)] = 0.0,
    max_concurrency: Annotated[
        int, typer.Option(min=0, help="Most requests in flight of an open loop; 0: no limit.")
    ] = 0,
    turns: Annotated[int, typer.Option(help="Requests of one conversation (chat).")] = 1,
    prefixes: Annotated[int, typer.Option(help="Number of shared prefixes.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each shared prefix.")] = 0,
    tenants: Annotated[str, typer.Option(help="Names, drawn evenly, sent as `user`.")] = "",
    cancel: Annotated[float, typer.Option(help="Share of requests that hang up midway.")] = 0.0,
    seed: Seed = 0,
    temperature: Annotated[float, number(least=0)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly the wanted output length.")] = True,
    timeout: Annotated[float, number("Seconds until a request counts as failed.", 0.001)] = 600.0,
    slo: SloText = "",
    warm_up: WarmUp = 0,
    label: Annotated[str, typer.Option(help="Name of the run in reports.")] = "",
    out: OutDir = Path("out/loadtest"),
) -> None:
    """Send a workload to an OpenAI-compatible server and report what its clients saw."""
    from msgspec.structs import replace

    from orcaserve.loadtest import report
    from orcaserve.loadtest.metrics import Slo
    from orcaserve.loadtest.output import console, print_json, print_run, refusals
    from orcaserve.loadtest.run import RunConfig, RunResult
    from orcaserve.loadtest.session import LoadOptions, build_load, run_once

    with refusals():
        options = LoadOptions(
            num_requests=num_requests,
            lengths=lengths,
            trace=trace,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            seed=seed,
            num_prefixes=prefixes,
            prefix_tokens=prefix_tokens,
            turns=turns,
            tenants=tuple(filter(None, tenants.split(","))),
            cancel_share=cancel,
            arrivals=arrivals,
            burstiness=burstiness,
            speed=speed,
            think_s=think,
            warm_up=warm_up,
        )
        load = build_load(options)
        loads = _loads(concurrency, rate)
        config = RunConfig(
            base_url=url,
            model=model,
            api=api,
            api_key=api_key,
            seed=seed,
            temperature=temperature,
            ignore_eos=ignore_eos,
            timeout_s=timeout,
            max_concurrency=max_concurrency,
            slo=Slo.parse(slo),
        )

        async def all_runs() -> list[RunResult]:
            results = []
            for number, (name, users, per_s) in enumerate(loads):
                named = replace(config, label=" ".join(filter(None, (label, name))) or url, seed=seed + number)
                results.append(await run_once(named, options, load, console, per_s, users))
                print_run(results[-1])
            return results

        results = asyncio.run(all_runs())
        page = report.write(results, out, f"Load test of {url}")
    console.print(f"report: {page}")
    print_json([{"label": r.label, "summary": r.summary, "server_queue_ms": r.server_queue_ms} for r in results])


@loadtest_app.command()
def compare(
    sides: Annotated[list[str], typer.Argument(help="Two or more result files, or URLs to be run in turns.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each URL, in turns A B B A ...")] = 3,
    model: Model = "",
    api: ApiName = "chat",
    num_requests: NumRequests = 48,
    lengths: LengthSpec = "fixed:128,64",
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
    warm_up: WarmUp = 8,
    out: OutDir = Path("out/compare"),
) -> None:
    """Set servers side by side: A.json B.json, or live URLs; ratios are to the first."""
    from orcaserve.loadtest import report
    from orcaserve.loadtest.compare import as_table, in_turns
    from orcaserve.loadtest.compare import compare as compare_sides
    from orcaserve.loadtest.output import console, print_json, print_table, refusals
    from orcaserve.loadtest.run import RunConfig
    from orcaserve.loadtest.session import LoadOptions, build_load, run_once

    with refusals():
        live = [side.startswith(("http://", "https://")) for side in sides]
        if any(live) != all(live):
            raise ValueError("compare either result files or URLs, not one of each")
        if all(live):
            options = LoadOptions(num_requests=num_requests, lengths=lengths, seed=seed, warm_up=warm_up)
            load = build_load(options)
            runs = [
                lambda number, url=url: run_once(
                    RunConfig(base_url=url, model=model, api=api, label=url, seed=seed + number),
                    options,
                    load,
                    console,
                    None,
                    concurrency,
                )
                for url in sides
            ]
            results = asyncio.run(in_turns(runs, rounds))
        else:
            results = [report.read_json(Path(side)) for side in sides]
        compared = compare_sides(results)
        print_table("Medians and ratios of each round", as_table(sides, compared))
        if all(live):
            for index, side in enumerate(results):
                report.write_json(side, out / f"{'abcdefgh'[index]}.json")
            page = report.write([side[-1] for side in results], out, f"Comparison: {' | '.join(sides)}")
            console.print(f"report of the last round: {page}")
    print_json(compared)


@loadtest_app.command("report")
def report_command(
    files: Annotated[list[Path], typer.Argument(help="results.json of earlier runs.")],
    out: OutDir = Path("out/report"),
) -> None:
    """Draw the report again, of one or several result files."""
    from orcaserve.loadtest import report
    from orcaserve.loadtest.output import console, refusals

    with refusals():
        results = [result for file in files for result in report.read_json(file)]
        console.print(f"report: {report.write(results, out, 'Load test')}")


@loadtest_app.command()
def start(
    idle_s: Annotated[float, number("How long to watch the idle server.", 0)] = 10.0,
) -> None:
    """Start a server and measure it: seconds to its first token, CPU share while idle; one JSON line."""
    from orcaserve.loadtest.output import print_json, refusals
    from orcaserve.loadtest.start import measure_start

    with refusals():
        print_json(measure_start(idle_s=idle_s))


@loadtest_app.command()
def chaos(
    faults: Annotated[int, typer.Option(min=1, help="As many of each kind as can be.")] = 200,
    seed: Seed = 0,
    every: Annotated[float, number("A fault every so many seconds; 0: at random times.", 0)] = 0.0,
    limit_s: Annotated[float, number("Fewer faults when this many seconds have passed; 0: all.", 0)] = 0.0,
    users: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 12,
    groups: Annotated[int, typer.Option(min=1)] = 2,
    nodes: Annotated[
        int, typer.Option(min=0, help="Pretended nodes with a group each, which are lost too; 0: none.")
    ] = 0,
    kinds: Annotated[str, typer.Option(help="Only these kinds, such as worker_killed,client_closed.")] = "",
    model: Annotated[str, typer.Option(help="smollm2-135m or a model folder.")] = "smollm2-135m",
    url: Annotated[str, typer.Option(help="A float32 server that runs already; empty: start one.")] = "",
    pid: Annotated[int, typer.Option(help="With --url: the process that all of that server is below.")] = 0,
) -> None:
    """Kill and stop parts of a server under load: is any stream lost, or other than its solo run?"""
    import contextlib

    from orcaserve.loadtest import chaos as drills
    from orcaserve.loadtest.drill_site import drill_place
    from orcaserve.loadtest.output import console, print_json, refusals

    with refusals(), contextlib.ExitStack() as stack:
        if bool(url) != bool(pid):
            raise ValueError("url and pid: a server that runs already is named by both")
        place = stack.enter_context(drill_place(model, groups, nodes, url, pid, seed))
        options = drills.DrillOptions(
            kinds=drills.parse_kinds(kinds, nodes),
            num_faults=faults,
            seed=seed,
            every_s=every,
            users=users,
            limit_s=limit_s,
        )
        report = asyncio.run(drills.Drill(place.url, place.injector, options, console.print).run())
    print_json(report)
    raise typer.Exit(0 if report.passed else 1)


@loadtest_app.command()
def table(
    model: Annotated[str, typer.Option(help="smollm2-135m or a model folder.")] = "smollm2-135m",
    users: Annotated[int, typer.Option(min=1)] = 50,
    num_requests: NumRequests = 100,
    lengths: LengthSpec = "sharegpt-small",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Slots of the continuous rows.")] = 64,
    chunk_budget: Annotated[int, typer.Option(min=1, help="Tokens of a step with chunked prefill.")] = 128,
    max_model_len: Annotated[int, typer.Option(min=2)] = 256,
    num_threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
    seed: Seed = 0,
    out: OutDir = Path("out/table"),
) -> None:
    """Static against continuous batching, measured with the real model in this process."""
    from orcaserve.loadtest import study
    from orcaserve.loadtest import table as tables
    from orcaserve.loadtest.output import console, model_folder, print_json, print_table, refusals

    with refusals():
        spec = study.StudySpec(
            users=users,
            num_requests=num_requests,
            lengths=lengths,
            seed=seed,
            max_num_seqs=max_num_seqs,
            chunk_budget=chunk_budget,
            max_model_len=max_model_len,
        )
        found = tables.measure(
            model_folder(model),
            spec,
            num_threads,
            lambda row: console.print(f"{row.variant.name}: {row.figures.output_throughput:.1f} output tokens/s"),
        )
        title = f"{model} on this machine, {users} users, measured"
        print_table(title, study.as_table(found.rows))
        print_table("The calibrated step-time model against it", tables.comparison(found))
        page = tables.write_report(found, out, title)
        console.print(f"report: {page}")
    print_json(
        {
            "measured": study.as_dict(found.rows),
            "modelled": study.as_dict(found.modelled),
            "step_deviation": found.step_deviation,
            "device": found.device,
        }
    )


@loadtest_app.command()
def stack(
    model: Annotated[str, typer.Option(help="Whose tokenizer the router uses.")] = "smollm2-135m",
    streams: Annotated[str, typer.Option(help="Numbers of HTTP streams.")] = "1,16,64,256",
    routers: Annotated[str, typer.Option()] = "1,2",
    groups: Annotated[str, typer.Option()] = "1,4",
    tokens: Annotated[int, typer.Option(min=2, help="Of each stream.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    step_ms: Annotated[float, number("Time of a step; 0: as fast as it goes.", 0)] = 0.0,
    peers: Annotated[bool, typer.Option(help="Compare with a plain Ray Serve app and a bare uvicorn app.")] = True,
    growth: Annotated[bool, typer.Option(help="Measure how the cost grows.")] = True,
) -> None:
    """The serving layers alone, with a model that costs nothing."""
    from orcaserve.loadtest import stack as stacks
    from orcaserve.loadtest.output import model_folder, numbers, print_json, print_table, refusals

    with refusals():
        folder, counts = model_folder(model), numbers("streams", streams)
        grown, compared = [], []
        if growth:
            for case in stacks.growth_cases(counts, numbers("routers", routers), numbers("groups", groups)):
                grown += stacks.measure(case, folder, tokens, 1)
            print_table("Growth", stacks.as_table(grown))
        if peers:
            compared = stacks.peer_rows(folder, max(counts), tokens, rounds, step_ms)
            print_table("Side by side", stacks.as_table(compared))
    print_json({"growth": grown, "peers": compared, "ratios": stacks.ratios(compared) if compared else {}})


@loadtest_app.command()
def bench(
    model: Annotated[str, typer.Option(help="smollm2-135m or a model folder.")] = "smollm2-135m",
    parts: Annotated[str, typer.Option(help="Any of served, overhead, start, stack.")] = "served,overhead,start,stack",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each server, in turns.")] = 3,
    peer_venv: Annotated[Path | None, typer.Option(help="Virtual environment with vLLM to start beside us.")] = None,
    peer_url: Annotated[str, typer.Option(help="A peer that runs already.")] = "",
    num_threads: Annotated[int, typer.Option(min=0, help="CPU threads of the step measured alone; 0: all cores.")] = 0,
    serve_options: Annotated[list[str] | None, typer.Argument(help="Options of `orcaserve serve`, after --.")] = None,
) -> None:
    """Reproduce the README's performance table; one JSON line last."""
    from orcaserve.loadtest import bench as benchmark
    from orcaserve.loadtest.output import console, model_folder, print_json, print_table, refusals

    with refusals():
        wanted = parts.split(",")
        if unknown := set(wanted) - {"served", "overhead", "start", "stack"}:
            raise ValueError(f"parts: {', '.join(sorted(unknown))} is none of served, overhead, start, stack")
        if peer_venv is not None and not (peer_venv / "bin" / "vllm").is_file():
            raise ValueError(f"peer-venv: there is no {peer_venv / 'bin' / 'vllm'}")
        rows = benchmark.run(
            model_folder(model), wanted, rounds, peer_venv, peer_url, serve_options or (), num_threads, console.print
        )
        print_table("Performance", benchmark.as_table(rows))
    print_json(rows)


def _loads(concurrency: str, rate: str) -> list[tuple[str, int | None, float | None]]:
    """(name, users, rate) of each run; neither given: everything at once, or a trace's own times."""
    if concurrency and rate:
        raise ValueError("concurrency (closed loop) and rate (open loop) exclude each other")
    try:
        users = [int(part) for part in concurrency.split(",") if part]
        rates = [float(part) for part in rate.split(",") if part]
    except ValueError as error:
        raise ValueError(f"concurrency and rate are numbers or lists of them: {error}") from error
    if users:
        return [(f"{n} users", n, None) for n in users]
    return [(f"{r:g}/s", None, r) for r in rates] or [("", None, None)]

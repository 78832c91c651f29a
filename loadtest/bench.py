"""The README's performance table, reproduced: every figure a ratio from one run, the servers loaded in turns.

The peer (vLLM) takes part where its virtual environment or a URL is given; without it orcaserve's own figures stand
alone. Both servers are up during the whole run and only one is loaded at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from orcaserve.cluster.local import free_port
from orcaserve.loadtest import stack, study, table, workload
from orcaserve.loadtest.arrivals import ClosedLoop
from orcaserve.loadtest.http_stream import ServerFailed, first_answer
from orcaserve.loadtest.prompts import PromptMaker
from orcaserve.loadtest.run import Generator, Progress, RunConfig, RunResult
from orcaserve.loadtest.serving import Serving, cpu_s
from orcaserve.loadtest.start import measure_start

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
CACHED_TOKENS = 1000
IN_FLIGHT = (1, 16, 64)
OVERHEAD_IN_FLIGHT = 16
SERVING_PARTS = ("ray::SchedulerActor", "ray::ServeReplica", "/haproxy ")
PEER_START_TIMEOUT_S = 600.0


class Aim(msgspec.Struct, frozen=True):
    """What a ratio to the peer should be."""

    ratio: float
    at_least: bool  # else at most

    def met(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.ratio:g}x"


class BenchRow(msgspec.Struct):
    """One line of the table; ratio is ours / the other's, medians over the rounds."""

    measure: str
    ours: float
    other: float | None
    other_name: str
    ratio: float | None
    aim: str
    met: bool | None


@contextlib.contextmanager
def vllm_serving(venv: Path, model_dir: Path) -> Iterator[tuple[str, float]]:
    """vLLM on a port of its own; gives its URL and the seconds from its start to its first token."""
    port = free_port()
    command = [
        str(venv / "bin" / "vllm"),
        "serve",
        str(model_dir),
        "--served-model-name",
        "peer",
        "--dtype",
        "bfloat16",
    ]
    command += ["--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=os.environ | quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        body = msgspec.json.encode({"model": "peer", "prompt": [1000] * 4, "max_tokens": 1, "stream": True})
        asyncio.run(first_answer(url, body, PEER_START_TIMEOUT_S, lambda: process.poll() is not None))
        yield url, time.monotonic() - began
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def load(url: str, users: int, seed: int) -> RunResult:
    """A closed loop of 128-token prompts and 64-token answers, three for each user and at least eight."""
    count = max(8, 3 * users)
    lengths = workload.fixed(PROMPT_TOKENS, OUTPUT_TOKENS)
    requests = workload.build(workload.WorkloadSpec(count, lengths, seed))
    generator = Generator(RunConfig(base_url=url, seed=seed), Progress(count))
    result = asyncio.run(generator.run(requests, ClosedLoop(users)))
    if result.summary.failed:
        raise ServerFailed(f"{url}: {result.summary.failed} of {count} requests failed: {result.summary.errors}")
    return result


def in_turns(
    urls: Sequence[str], rounds: int, on_run: Callable[[RunResult], None], in_flight: Sequence[int] = IN_FLIGHT
) -> dict[int, list[list[RunResult]]]:
    """users -> runs of each server. Prompts are new in each round, the same for all servers."""
    for url in urls:
        load(url, 16, seed=10_000)
    runs: dict[int, list[list[RunResult]]] = {users: [[] for _ in urls] for users in in_flight}
    for number in range(rounds):
        for users in in_flight:
            order = range(len(urls)) if number % 2 == 0 else reversed(range(len(urls)))
            for side in order:
                runs[users][side].append(load(urls[side], users, seed=100 * number + users))
                on_run(runs[users][side][-1])
    return runs


Read = Callable[[RunResult], float]
SERVED: tuple[tuple[str, int, Read, Aim], ...] = (
    ("output tokens/s, 16 in flight", 16, lambda r: r.summary.output_throughput, Aim(1.5, True)),
    ("output tokens/s, 64 in flight", 64, lambda r: r.summary.output_throughput, Aim(1.5, True)),
    ("TPOT ms, 1 in flight", 1, lambda r: r.summary.tpot_ms["mean"], Aim(0.6, False)),
    ("TTFT mean ms, 16 in flight", 16, lambda r: r.summary.ttft_ms["mean"], Aim(0.6, False)),
)


def served_rows(runs: dict[int, list[list[RunResult]]], peer: str) -> list[BenchRow]:
    """The rows that compare servers; ratios are taken within a round."""
    rows = []
    for name, users, read, aim in SERVED:
        own, *others = runs[users]
        values = [read(r) for r in own]
        if not others:
            rows.append(BenchRow(name, statistics.median(values), None, "", None, str(aim), None))
            continue
        theirs = [read(r) for r in others[0]]
        ratio = statistics.median(a / b for a, b in zip(values, theirs, strict=True))
        medians = statistics.median(values), statistics.median(theirs)
        rows.append(BenchRow(name, *medians, peer, ratio, str(aim), aim.met(ratio)))
    return rows


def cached_prefix_row(url: str) -> BenchRow:
    """First tokens of long prompts that come one by one, and of the same ones when they come again."""
    count, seed = 7, 30_000
    requests = workload.build(workload.WorkloadSpec(count, workload.fixed(CACHED_TOKENS, 8), seed))
    unseen_ms, again_ms = (
        asyncio.run(
            Generator(RunConfig(base_url=url, seed=seed), Progress(count)).run(requests, ClosedLoop(1))
        ).summary.ttft_ms["p50"]
        for _ in range(2)
    )
    name = f"TTFT p50 ms, {CACHED_TOKENS:,} prompt tokens known"
    return BenchRow(name, again_ms, unseen_ms, "new ones", again_ms / unseen_ms, "", None)


def start_row(options: Sequence[str], peer_start_s: float | None) -> BenchRow:
    """From the command to the first token, the model cached."""
    own = float(measure_start(tuple(options), idle_s=1.0)["first_token_s"])
    aim = Aim(0.2, False)
    if peer_start_s is None:
        return BenchRow("start to first token, s", own, None, "", None, str(aim), None)
    ratio = own / peer_start_s
    return BenchRow("start to first token, s", own, peer_start_s, "vLLM", ratio, str(aim), aim.met(ratio))


def stack_rows(model_dir: Path, rounds: int) -> list[BenchRow]:
    """256 HTTP streams from a model that costs nothing, against a plain Ray Serve app and a bare uvicorn app.

    At a step's pace only the bare app is a measure: the Ray app is far from keeping it.
    """
    rows = []
    aims: dict[stack.Kind, Aim] = {"ray-generator": Aim(2.5, True), "uvicorn": Aim(0.8, True)}
    for pace, step_ms, kinds in (("as fast as it goes", 0.0, tuple(aims)), ("a step every 20 ms", 20.0, ("uvicorn",))):
        measured = stack.peer_rows(model_dir, 256, stack.OUTPUT_TOKENS, rounds, step_ms, ("orcaserve", *kinds))
        ratios = stack.ratios(measured)
        own = statistics.median(r.tokens_per_s for r in measured if r.case.kind == "orcaserve")
        for kind in kinds:
            other = statistics.median(r.tokens_per_s for r in measured if r.case.kind == kind)
            ratio, aim = ratios[f"orcaserve / {kind}"], aims[kind]
            name = f"tokens/s to 256 streams, null model, {pace}"
            rows.append(BenchRow(name, own, other, kind, ratio, str(aim), aim.met(ratio)))
    return rows


def overhead_row(runs: Sequence[RunResult], model_dir: Path, num_threads: int) -> BenchRow:
    """The gap between tokens over HTTP at 16 in flight against the step alone: what everything else on the machine
    adds to a step, load generator and Ray's own processes counted."""
    gaps = statistics.median(r.summary.itl_ms["p50"] for r in runs)
    spec = study.StudySpec(
        users=OVERHEAD_IN_FLIGHT,
        num_requests=OVERHEAD_IN_FLIGHT,
        lengths=f"fixed:{PROMPT_TOKENS},{OUTPUT_TOKENS}",
        max_num_seqs=OVERHEAD_IN_FLIGHT,
        chunk_budget=512,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
    )
    worker, num_blocks = table.load_worker(model_dir, spec, num_threads=num_threads)
    executor = table.MeasuredWorker(worker, spec.max_num_seqs)
    variant = study.VARIANTS[-1]
    row = study.run_variant(
        variant, spec, num_blocks, executor, study.requests(spec), PromptMaker(1).ids, time.perf_counter
    )
    worker.close()
    decodes = [
        s
        for s, p, d in zip(row.steps.seconds, row.steps.prefill_tokens, row.steps.decode_tokens, strict=True)
        if d == OVERHEAD_IN_FLIGHT and not p
    ]
    step_ms = statistics.median(decodes) * 1e3
    aim = Aim(0.1, False)
    share = 1 - step_ms / gaps
    name = "gap between tokens, 16 in flight, ms: all but the step"
    return BenchRow(name, gaps, step_ms, "the step alone, ms", share, str(aim), aim.met(share))


def serving_cpu_row(server: Serving) -> BenchRow:
    """The processor time that scheduler, router and proxy use in a run, whose steps follow one another."""
    own = [pid for pid, command in server.processes().items() if any(part in command for part in SERVING_PARTS)]
    before, began = sum(map(cpu_s, own)), time.monotonic()
    load(server.url, OVERHEAD_IN_FLIGHT, seed=20_000)
    wall_s = time.monotonic() - began
    used_s = sum(map(cpu_s, own)) - before
    aim, share = Aim(0.1, False), used_s / wall_s
    name = "CPU time of scheduler, router and proxy, 16 in flight, s"
    return BenchRow(name, used_s, wall_s, "the run, s", share, str(aim), aim.met(share))


def as_table(rows: Sequence[BenchRow]) -> list[list[str]]:
    """For printing."""
    lines = [["measure", "orcaserve", "other", "", "ratio", "aim", "met"]]
    for row in rows:
        other = "" if row.other is None else f"{row.other:,.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        met = {None: "", True: "yes", False: "no"}[row.met]
        lines.append([row.measure, f"{row.ours:,.2f}", other, row.other_name, ratio, row.aim, met])
    return lines


def run(
    model_dir: Path,
    parts: Sequence[str],
    rounds: int,
    peer_venv: Path | None,
    peer_url: str,
    serve_options: Sequence[str],
    num_threads: int,
    say: Callable[[str], None],
) -> list[BenchRow]:
    """The wanted parts of: served, overhead, start, stack."""
    rows: list[BenchRow] = []
    peer_start_s: float | None = None
    if {"served", "overhead"} & set(parts):
        compares = "served" in parts
        with contextlib.ExitStack() as servers:
            urls = []
            own = Serving(str(model_dir), *serve_options)
            servers.callback(own.stop)
            own.wait_ready()
            urls.append(own.url)
            if compares and peer_url:
                urls.append(peer_url)
            elif compares and peer_venv is not None:
                say("starting the peer")
                url, peer_start_s = servers.enter_context(vllm_serving(peer_venv, model_dir))
                urls.append(url)
            runs = in_turns(
                urls,
                rounds,
                lambda r: say(f"{r.label}, {r.arrivals}: {r.summary.output_throughput:.1f} tokens/s"),
                IN_FLIGHT if compares else (OVERHEAD_IN_FLIGHT,),
            )
            if compares:
                rows += served_rows(runs, "vLLM" if peer_venv is not None and not peer_url else peer_url)
                rows.append(cached_prefix_row(own.url))
            if "overhead" in parts:
                rows.append(serving_cpu_row(own))
        if "overhead" in parts:
            say("measuring the step alone")
            rows.append(overhead_row(runs[OVERHEAD_IN_FLIGHT][0], model_dir, num_threads))
    if "start" in parts:
        say("measuring a start")
        rows.append(start_row([str(model_dir), *serve_options], peer_start_s))
    if "stack" in parts:
        say("measuring the serving layers")
        rows += stack_rows(model_dir, rounds)
    return rows

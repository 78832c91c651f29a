"""The serving layers alone: tokens a second to many HTTP streams from a model that costs nothing.

orcaserve's router, scheduler, channel and stream against a plain Ray Serve app and a bare uvicorn app, in turns; and
how orcaserve's cost grows with streams, routers and groups, with the CPU time a token of each part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from orcaserve.cluster.local import free_port
from orcaserve.loadtest import workload
from orcaserve.loadtest.arrivals import ClosedLoop
from orcaserve.loadtest.http_stream import ServerFailed, first_answer
from orcaserve.loadtest.run import Generator, Progress, RunConfig, RunResult
from orcaserve.loadtest.serving import cpu_s, processes_under

Kind = Literal["orcaserve", "ray-generator", "uvicorn"]
START_TIMEOUT_S = 120.0
PROMPT_TOKENS = 16
# Of each stream: an answer of middling length. With 64 it is half about opening so many connections at once.
OUTPUT_TOKENS = 256


class StackCase(msgspec.Struct, frozen=True):
    """One server and one load."""

    kind: Kind
    streams: int
    routers: int = 1
    groups: int = 1
    step_ms: float = 0.0


class StackRow(msgspec.Struct):
    """What came out."""

    case: StackCase
    tokens_per_s: float
    tokens_per_chunk: float  # above 1 where a router gives a stream all that came while it was busy as one chunk
    failed: int
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    cpu_us_per_token: dict[str, float]  # by part: where the server says which process is which


@contextlib.contextmanager
def running(case: StackCase, model_dir: Path) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Start the case's server; gives its URL and its process ids by part."""
    port = free_port()
    command = [sys.executable, "-m", "orcaserve.loadtest.stack_server", case.kind, "--port", str(port)]
    command += ["--model", str(model_dir), "--groups", str(case.groups), "--routers", str(case.routers)]
    command += ["--step-ms", str(case.step_ms)]
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop the server when full
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # its end tells the server that we are gone
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids: dict[str, list[int]] | None = None
        for line in process.stdout:
            if line.startswith('{"pids"'):
                pids = json.loads(line)["pids"]
                break
        if pids is None:
            complaints.seek(0)
            raise ServerFailed(f"{case.kind} did not start: {complaints.read().decode(errors='replace')[-2000:]}")
        url = f"http://127.0.0.1:{port}"
        body = json.dumps({"prompt": [300] * 4, "max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
        asyncio.run(first_answer(url, body, START_TIMEOUT_S))
        yield url, pids | _serve_parts(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        complaints.close()


def _serve_parts(root: int) -> dict[str, list[int]]:
    """Ray Serve's processes, told by their names."""
    parts: dict[str, list[int]] = {}
    for pid, command in processes_under(root).items():
        for part, mark in (("routers", "ServeReplica"), ("proxy", "haproxy"), ("proxy", "ProxyActor")):
            if mark in command:
                parts.setdefault(part, []).append(pid)
    return parts


def measure(case: StackCase, model_dir: Path, tokens_per_stream: int, rounds: int) -> list[StackRow]:
    """Start the server once and load it `rounds` times, after a warm-up."""
    with running(case, model_dir) as (url, pids):
        _load(url, case.streams, min(32, tokens_per_stream))
        return [_measure_once(url, case, pids, tokens_per_stream) for _ in range(rounds)]


def _measure_once(url: str, case: StackCase, pids: dict[str, list[int]], tokens_per_stream: int) -> StackRow:
    before = {pid: cpu_s(pid) for found in pids.values() for pid in found}
    own = time.process_time()
    result = _load(url, case.streams, tokens_per_stream)
    s = result.summary
    tokens = max(1, s.output_tokens)
    cpu = {
        # An HAProxy that was replaced during the run has no time left to show.
        part: sum(max(0.0, cpu_s(pid) - before[pid]) for pid in found) / tokens * 1e6
        for part, found in pids.items()
    }
    cpu["client"] = (time.process_time() - own) / tokens * 1e6
    return StackRow(
        case,
        s.output_throughput,
        tokens / max(1, sum(len(record.chunk_times_s) for record in result.records)),
        s.failed,
        s.ttft_ms.get("p50", 0.0),
        s.itl_ms.get("p50", 0.0),
        s.itl_ms.get("p99", 0.0),
        cpu,
    )


def _load(url: str, streams: int, tokens: int) -> RunResult:
    requests = workload.build(workload.WorkloadSpec(streams, workload.fixed(PROMPT_TOKENS, tokens)))
    generator = Generator(RunConfig(base_url=url, timeout_s=300.0), Progress(streams))
    return asyncio.run(generator.run(requests, ClosedLoop(streams)))


def peer_rows(
    model_dir: Path,
    streams: int,
    tokens_per_stream: int,
    rounds: int,
    step_ms: float,
    kinds: Sequence[Kind] = ("orcaserve", "ray-generator", "uvicorn"),
) -> list[StackRow]:
    """The servers under the same load, one after the other, `rounds` runs of each in turns."""
    rows = []
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            rows += measure(StackCase(kind, streams, step_ms=step_ms), model_dir, tokens_per_stream, 1)
    return rows


def growth_cases(streams: Sequence[int], routers: Sequence[int], groups: Sequence[int]) -> list[StackCase]:
    """One dimension at a time, the others at their first value (streams at their last)."""
    most = max(streams)
    cases = [StackCase("orcaserve", n, routers[0], groups[0]) for n in streams]
    cases += [StackCase("orcaserve", most, n, groups[0]) for n in routers[1:]]
    return cases + [StackCase("orcaserve", most, routers[0], n) for n in groups[1:]]


def ratios(rows: Sequence[StackRow]) -> dict[str, float]:
    """orcaserve's tokens a second over each peer's, medians of the runs."""

    def median(kind: Kind) -> float:
        return statistics.median(row.tokens_per_s for row in rows if row.case.kind == kind)

    own = median("orcaserve")
    peers = dict.fromkeys(row.case.kind for row in rows if row.case.kind != "orcaserve")
    return {f"orcaserve / {kind}": own / median(kind) for kind in peers}


def as_table(rows: Sequence[StackRow]) -> list[list[str]]:
    """For printing."""
    table = [
        [
            "server",
            "streams",
            "routers",
            "groups",
            "tokens/s",
            "tokens/chunk",
            "TTFT p50 ms",
            "ITL p50 ms",
            "ITL p99 ms",
            "CPU us/token",
        ]
    ]
    for row in rows:
        case = row.case
        cpu = ", ".join(f"{part} {us:.0f}" for part, us in row.cpu_us_per_token.items())
        counts = [str(case.streams), str(case.routers), str(case.groups)]
        times = [f"{row.ttft_p50_ms:,.0f}", f"{row.itl_p50_ms:.1f}", f"{row.itl_p99_ms:.1f}"]
        failed = f" ({row.failed} failed)" if row.failed else ""
        speed = [f"{row.tokens_per_s:,.0f}{failed}", f"{row.tokens_per_chunk:.1f}"]
        table.append([case.kind, *counts, *speed, *times, cpu])
    return table

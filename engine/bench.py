"""`python -m orcaserve.engine.bench`: what a step costs the scheduler. Prints one JSON line last.

Decodes: schedule + apply for a steady batch, as the peer's script measures its own (128 prompt tokens each, all in
step, and `staggered`: of different lengths, so that some row crosses a block boundary in every step).
Mixed: requests of 200 to 800 prompt tokens come and go all the time beside the decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler

NUM_STEPS = 260
BLOCK_SIZE = 16


def result_for(plan: StepPlan) -> StepResult:
    """Token 5 for every sampling row."""
    rows = len(plan.decode_slots) // 4 + sum(chunk.samples for chunk in plan.chunks)
    return StepResult(plan.step_id, np.full(rows, 5, np.int32).tobytes())


def make_scheduler(running: int, num_blocks: int, num_groups: int = 1, budget: int = 8192) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=4096,
        eos_token_ids=(2,),
        block_size=BLOCK_SIZE,
        max_num_seqs=max(running, 16),
        max_num_batched_tokens=budget,
        max_queued_requests=1_000_000,
        max_queued_tokens=1_000_000_000,
    )
    scheduler = Scheduler(config)
    for group in range(num_groups):
        scheduler.add_group(group, num_blocks)
    return scheduler


def request(i: int, num_prompt: int, max_tokens: int = 3000) -> GenerateRequest:
    prompt = tuple((i * 7 + j) % 49_000 for j in range(num_prompt))
    return GenerateRequest(str(i), prompt, SamplingParams(max_tokens, seed=i, ignore_eos=True))


def step_us(scheduler: Scheduler, group: int, steady: Callable[[StepPlan], bool]) -> float | None:
    """Time schedule + apply of one step; None if it was not of the kind that is measured."""
    start = time.perf_counter()
    plan = scheduler.schedule(group, start)
    planned = time.perf_counter()
    assert plan is not None, "nothing to plan"
    result = result_for(plan)
    before = time.perf_counter()
    scheduler.apply(group, result, before)
    done = time.perf_counter()
    return (planned - start + done - before) * 1e6 if steady(plan) else None


def percentiles(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "steps": len(times),
    }


def decodes(running: int, num_blocks: int, *, waiting: int = 0, staggered: bool = False) -> dict[str, float]:
    """A steady batch, after its prompts."""
    scheduler = make_scheduler(running, num_blocks)
    for i in range(running):
        scheduler.add(request(i, 128 + (i % BLOCK_SIZE if staggered else 0)), 0.0)
    warm_up = (running * (128 + BLOCK_SIZE)) // 8192 + 2
    for _ in range(warm_up):
        step_us(scheduler, 0, lambda plan: False)
    for i in range(waiting):
        scheduler.add(request(running + i, 16), 0.0)
    times = [step_us(scheduler, 0, lambda plan: len(plan.decode_slots) == 4 * running) for _ in range(NUM_STEPS)]
    return percentiles([t for t in times if t is not None])


def mixed(running: int, num_blocks: int, num_groups: int) -> dict[str, float]:
    """Requests come and go, half of them with a prefix that others have; all groups in turn, two steps in flight."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(running, num_blocks, num_groups, budget=2048)
    shared = [tuple(rng.integers(49_000, size=256).tolist()) for _ in range(8)]

    def arrivals() -> Iterator[GenerateRequest]:
        i = 0
        while True:
            own = tuple(rng.integers(49_000, size=int(rng.integers(200, 800))).tolist())
            prompt = shared[int(rng.integers(8))] + own if rng.random() < 0.5 else own
            sampling = SamplingParams(int(rng.integers(20, 200)), seed=i, ignore_eos=True)
            yield GenerateRequest(str(i), prompt, sampling)
            i += 1

    source = arrivals()
    times: list[float] = []
    flights: list[list[StepPlan]] = [[] for _ in range(num_groups)]
    num_steps = 500 * num_groups
    for n in range(num_steps):
        while scheduler.stats().waiting < 8:
            scheduler.add(next(source), float(n))
        group = n % num_groups
        start = time.perf_counter()
        plan = scheduler.schedule(group, float(n))
        took = time.perf_counter() - start
        if plan is not None:
            flights[group].append(plan)
        if len(flights[group]) == 2 or plan is None:
            result = result_for(flights[group].pop(0))
            start = time.perf_counter()
            scheduler.apply(group, result, float(n))
            took += time.perf_counter() - start
        if n >= num_steps // 2:
            times.append(took * 1e6)
    return percentiles(times)


def peer(python: str, script: str, model_dir: str, running: int) -> dict[str, float] | str:
    """The peer's own figure, from its own environment, in the same run."""
    done = subprocess.run([python, script, model_dir, str(running)], capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr[-400:]
    figure: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figure


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m orcaserve.engine.bench", description=__doc__)
    parser.add_argument(
        "--peer",
        nargs=3,
        metavar=("PYTHON", "SCRIPT", "MODEL_DIR"),
        help="also run SCRIPT MODEL_DIR NUM_RUNNING with this interpreter, which prints a JSON line with p50_us",
    )
    args = parser.parse_args(argv)
    figures: dict[str, object] = {"cores": os.cpu_count()}
    figures["decodes"] = {str(n): decodes(n, 100_000) for n in (16, 256, 1024)}
    figures["decodes_staggered"] = {str(n): decodes(n, 100_000, staggered=True) for n in (16, 256, 1024)}
    figures["decodes_256_by_blocks"] = {str(n): decodes(256, n) for n in (8_000, 100_000)}
    figures["decodes_16_by_blocks"] = {str(n): decodes(16, n) for n in (1_000, 100_000)}
    figures["decodes_256_by_waiting"] = {str(n): decodes(256, 100_000, waiting=n) for n in (0, 1_000, 20_000)}
    figures["mixed_64_by_groups"] = {str(n): mixed(64, 10_000, n) for n in (1, 2, 8, 32)}
    figures["mixed_64_by_blocks"] = {str(n): mixed(64, n, 1) for n in (1_000, 10_000, 100_000)}
    if args.peer:
        peers = {str(n): peer(args.peer[0], args.peer[1], args.peer[2], n) for n in (16, 256, 1024)}
        ours = {str(n): decodes(n, 100_000) for n in (16, 256, 1024)}
        figures["peer"] = peers
        figures["times_faster"] = {
            n: round(p["p50_us"] / ours[n]["p50_us"], 1) for n, p in peers.items() if isinstance(p, dict)
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])

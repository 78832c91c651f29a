"""Many groups on the virtual clock: cells of groups under one scheduler each, spread over the machine's cores.

A cell is one orcaserve: one scheduler, up to `GROUPS_PER_CELL` groups. Requests go to the cells in turn, as a load
balancer would send them; inside a cell the scheduler's own dispatch decides.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec
import numpy as np

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import OpenLoop, Times
from orcaserve.loadtest.leaping import LeapingSimulation
from orcaserve.loadtest.model_shape import ModelShape
from orcaserve.loadtest.outcome import Outcome, merge
from orcaserve.loadtest.simulate import VirtualWorkers
from orcaserve.loadtest.step_time import Device, StepTime
from orcaserve.loadtest.workload import Lengths, LoadRequest

GROUPS_PER_CELL = 32


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Like groups of one model."""

    shape: ModelShape
    device: Device
    tensor_parallel_size: int
    num_groups: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_model_len: int = 8192
    groups_per_cell: int = GROUPS_PER_CELL

    @property
    def num_kv_blocks(self) -> int:
        """Of each group."""
        return self.shape.num_kv_blocks(
            self.device.memory_bytes, self.tensor_parallel_size, self.block_size, self.gpu_memory_utilization
        )

    def cells(self) -> list[int]:
        """How many groups each cell has: as few cells as can be, filled evenly."""
        count = -(-self.num_groups // self.groups_per_cell)
        return [self.num_groups // count + (i < self.num_groups % count) for i in range(count)]

    def scheduler(self, num_groups: int) -> Scheduler:
        """A cell's scheduler: continuous batching with chunked prefill, planning one step ahead."""
        config = SchedulerConfig(
            max_model_len=self.max_model_len,
            eos_token_ids=(),
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=False,
            max_queued_requests=10_000_000,
            max_queued_tokens=1 << 60,
        )
        scheduler = Scheduler(config)
        for group in range(num_groups):
            scheduler.add_group(group, self.num_kv_blocks)
        return scheduler


class _Share(msgspec.Struct):
    """What one process is given: a cell and its requests."""

    fleet: Fleet
    num_groups: int
    times_s: Times
    prompt_tokens: Lengths
    output_tokens: Lengths


def run_fleet(
    fleet: Fleet,
    times_s: Times,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    processes: int = 1,
    on_cell: Callable[[int, int], None] = lambda _done, _of: None,
) -> Outcome:
    """Serve all requests; several processes share the cells. `on_cell(done, of)` hears of each cell that is through."""
    cells = fleet.cells()
    shares = [
        _Share(fleet, size, times_s[i :: len(cells)], prompt_tokens[i :: len(cells)], output_tokens[i :: len(cells)])
        for i, size in enumerate(cells)
    ]
    outcomes = []
    for outcome in _run_all(shares, processes):
        outcomes.append(outcome)
        on_cell(len(outcomes), len(shares))
    return merge(outcomes)


def _run_all(shares: Sequence[_Share], processes: int) -> Iterator[Outcome]:
    if processes <= 1 or len(shares) == 1:
        yield from map(_run_cell, shares)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(shares)), mp_context=context) as pool:
        yield from pool.map(_run_cell, shares)


def _run_cell(share: _Share) -> Outcome:
    fleet = share.fleet
    step_time = StepTime(fleet.shape, fleet.device, fleet.tensor_parallel_size)
    requests = [
        LoadRequest(i, prompt, output)
        for i, (prompt, output) in enumerate(
            zip(share.prompt_tokens.tolist(), share.output_tokens.tolist(), strict=True)
        )
    ]
    executors = {group: VirtualWorkers(step_time, fleet.max_num_seqs) for group in range(share.num_groups)}
    return LeapingSimulation(fleet.scheduler(share.num_groups), executors, requests, OpenLoop(share.times_s)).run()


def fit_lengths(prompt: Lengths, output: Lengths, max_model_len: int) -> tuple[Lengths, Lengths]:
    """Cut lengths to the context: the answer to at most half of it, the prompt to the rest."""
    output = np.minimum(output, max_model_len // 2)
    return np.minimum(prompt, max_model_len - output), output

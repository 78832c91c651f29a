"""Groups of ranks in processes of their own, driven by the real scheduler."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from orcaserve.cluster.local import free_port
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, PoolFile, StepPlan, TokenDelta
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler
from orcaserve.workers.config import WorkerConfig

DEADLINE_S = 120.0
RANK_PROCESS = Path(__file__).with_name("rank_process.py")


class RankPool:
    """Processes that take the part of ranks, started once and used by one group after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []

    def links(self, size: int) -> list[Connection]:
        missing = range(len(self._links), size)
        listeners = [Listener(str(self._folder / f"rank{number}"), "AF_UNIX") for number in missing]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for listener in listeners:
            command = [sys.executable, str(RANK_PROCESS), str(listener.address)]
            self._processes.append(subprocess.Popen(command, env=environment))
        for listener in listeners:
            listener._listener._socket.settimeout(DEADLINE_S)  # type: ignore[attr-defined]
            self._links.append(listener.accept())
            listener.close()
        return self._links[:size]

    def kill(self) -> None:
        """They have no time to do anything about it."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(DEADLINE_S)

    def close(self) -> None:
        for link in self._links:
            with suppress(BrokenPipeError):  # a test may have ended it
                link.send(None)
        for process in self._processes:
            process.wait(DEADLINE_S)


class RankGroup:
    """The ranks of one group, all called at once."""

    def __init__(self, links: Sequence[Connection], config: WorkerConfig, num_blocks: int = 256) -> None:
        self.links = links
        self.config = config
        init_method = f"tcp://127.0.0.1:{free_port()}"
        self.num_blocks = min(
            self._gather([("start", (config, rank, init_method, num_blocks)) for rank in range(len(links))])
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """What rank 0 answers; raises what any rank raised."""
        return self._gather([(name, arguments)] * len(self.links))[0]

    def pool_files(self) -> list[PoolFile]:
        return self._gather([("pool_file", ())] * len(self.links))

    def hold(self, group_id: int, files: Sequence[PoolFile]) -> None:
        """Each rank the pool of the same rank."""
        self._gather([("hold", (group_id, file)) for file in files])

    def step(self, plan: StepPlan) -> Any:
        return self.call("step", plan)

    def _gather(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        for link, call in zip(self.links, calls, strict=True):
            link.send(call)
        answers = []
        for link in self.links:
            assert link.poll(DEADLINE_S), "a rank does not answer"
            answers.append(link.recv())
        for succeeded, value in answers:
            if not succeeded:
                raise value
        return [value for _, value in answers]


def generate(
    group: RankGroup,
    requests: Sequence[GenerateRequest],
    *,
    budget: int = 64,
    arrive_every: int = 0,
    num_speculative_tokens: int = 0,
    max_steps_in_flight: int = 1,
    enable_prefix_caching: bool = True,
) -> dict[str, list[TokenDelta]]:
    """Run requests through a new scheduler over the group, one arriving every `arrive_every` steps (0: all at once)."""
    config = SchedulerConfig(
        max_model_len=group.config.max_model_len,
        eos_token_ids=(),
        max_num_seqs=group.config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_steps_in_flight=max_steps_in_flight,
        num_speculative_tokens=num_speculative_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    group.call("reset")
    scheduler = Scheduler(config)
    scheduler.add_group(0, group.num_blocks)
    waiting, num_steps = list(requests), 0
    found: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    while waiting or scheduler.has_work(0):
        while waiting and (num_steps % max(1, arrive_every) == 0 or not scheduler.has_work(0)):
            scheduler.add(waiting.pop(0), 0.0)
            if arrive_every:
                break
        plans: list[StepPlan] = []
        while (plan := scheduler.schedule(0, 0.0)) is not None:
            plans.append(plan)
        for plan in plans:
            num_steps += 1
            for deltas in scheduler.apply(0, group.step(plan), 0.0).values():
                for delta in deltas:
                    found[delta.request_id].append(delta)
        scheduler.check_invariants()
    return found


def token_ids(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def greedy(name: str, prompt: Sequence[int], max_tokens: int, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, **changes)
    return GenerateRequest(name, tuple(prompt), sampling)


@functools.cache
def rank_pool() -> RankPool:
    """The one pool of the test session."""
    folder = tempfile.TemporaryDirectory(prefix="orcaserve-ranks-")
    pool = RankPool(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(pool.close)
    return pool


def make_group(model_dir: Path, size: int, num_blocks: int = 256, **changes: Any) -> RankGroup:
    """A loaded group; the next one takes over its ranks. `changes` are fields of WorkerConfig."""
    fields = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 128, "dtype": "float32"}
    fields["grammar_compile_timeout_s"] = 120.0
    config = WorkerConfig(model_dir=str(model_dir), tensor_parallel_size=size, **(fields | changes))
    return RankGroup(rank_pool().links(size), config, num_blocks)

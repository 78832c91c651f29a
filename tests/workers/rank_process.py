"""One rank of a tensor-parallel group as a process of its own: carries out what the test sends, one call at a time.

    python rank_process.py SOCKET

The logits that rank 0 samples from can be asked for, so that tests compare them and not only the tokens.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client
from typing import Any

import numpy as np
import torch

from orcaserve.engine.messages import PoolFile
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.sharding import even_span
from orcaserve.workers.tp import DistributedGroup, make_store
from orcaserve.workers.worker import Worker


class Rank:
    worker: Worker | None = None

    def start(self, config: WorkerConfig, rank: int, init_method: str, num_blocks: int) -> int:
        """A loaded worker with a pool of `num_blocks` (0: all that fit); returns the number of blocks."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        worker = Worker(config, rank, init_method)
        worker.load()
        num_blocks = num_blocks or worker.num_kv_blocks()
        worker.allocate(num_blocks)
        self.worker = worker
        return num_blocks

    def reset(self) -> None:
        assert self.worker is not None
        self.worker.reset()

    def warm_up(self) -> None:
        assert self.worker is not None
        self.worker.warm_up()

    def pool_file(self) -> PoolFile | None:
        assert self.worker is not None
        return self.worker.pool_file

    def hold(self, group_id: int, file: PoolFile) -> None:
        assert self.worker is not None
        self.worker.hold(group_id, file)

    def step(self, plan: Any) -> Any:
        assert self.worker is not None
        return self.worker.step(plan)

    def step_with_logits(self, plan: Any) -> Any:
        """(result, the logits as they came from the model) on rank 0."""
        assert self.worker is not None
        seen: list[np.ndarray] = []
        sampler = self.worker.sampler
        if sampler is not None:
            choose = sampler.sample

            def spy(logits: torch.Tensor, slots: np.ndarray) -> Any:
                seen.append(logits.cpu().numpy().copy())  # torch would send a handle, not the numbers
                return choose(logits, slots)

            sampler.sample = spy  # type: ignore[method-assign]
        result = self.worker.step(plan)
        if sampler is not None:
            del sampler.sample
        return result, seen

    def gloo(self, address: str, rank: int, size: int) -> tuple[list, list | None, list]:
        """(all-reduce, gather, broadcast) as ranks on several hosts would compute them."""
        group = DistributedGroup(make_store(address, rank, size, 30.0), rank, size, "gloo", 30.0)
        generator = torch.Generator().manual_seed(rank)
        reduced = group.all_reduce(torch.randn(4, 10, generator=generator).bfloat16()).float().tolist()
        span = even_span(10, size, rank)
        whole = torch.randn(2, 10, generator=torch.Generator().manual_seed(9))
        gathered = group.gather_columns(whole[:, span.start : span.stop], 10)
        sent = group.broadcast(torch.tensor([7, 8]) if rank == 0 else torch.zeros(2, dtype=torch.int64)).tolist()
        group.close()
        return reduced, None if gathered is None else gathered.tolist(), sent

    def gloo_alone(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        """Rank 0 begins an all-reduce that nobody else takes part in, and gives it up."""
        store = make_store(address, rank, size, 300.0)
        group = DistributedGroup(store, rank, size, "gloo", 300.0)
        group.set_timeout(timeout_s)
        if rank == 0:
            try:
                group.all_reduce(torch.ones(4))
            except RuntimeError:
                store.set("given up", "")
            else:
                raise AssertionError("it was reduced without the other ranks")
        else:
            store.wait(["given up"])
        group.close()


def serve(address: str) -> None:
    rank = Rank()
    with Client(address) as link:
        while (call := link.recv()) is not None:
            name, arguments = call
            try:
                link.send((True, getattr(rank, name)(*arguments)))
            except Exception as error:  # noqa: BLE001 (the test raises it)
                link.send((False, error))


if __name__ == "__main__":
    serve(sys.argv[1])

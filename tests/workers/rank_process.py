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

from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.worker import Worker


class Rank:
    worker: Worker

    def start(self, config: WorkerConfig, rank: int, init_method: str, num_blocks: int) -> int:
        """A loaded worker with a pool of `num_blocks` (0: all that fit); returns the number of blocks."""
        self.worker = Worker(config, rank, init_method)
        self.worker.load()
        num_blocks = num_blocks or self.worker.num_kv_blocks()
        self.worker.allocate(num_blocks)
        return num_blocks

    def reset(self) -> None:
        self.worker.reset()

    def step(self, plan: Any) -> Any:
        return self.worker.step(plan)

    def step_with_logits(self, plan: Any) -> Any:
        """(result, the logits as they came from the model) on rank 0."""
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

    def close(self) -> None:
        self.worker.close()


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

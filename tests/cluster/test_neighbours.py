"""Who holds whose KV pool, and until when."""

from __future__ import annotations

import msgspec
import numpy as np

from orcaserve.cluster.neighbours import Neighbours
from orcaserve.cluster.wire import Forget, Hello, Holds, Neighbour
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, PoolFile, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler

CONFIG = SchedulerConfig(
    max_model_len=256, eos_token_ids=(2,), block_size=4, max_num_seqs=8, max_num_batched_tokens=64, watermark=0.0
)


class Street:
    """Groups on nodes, their scheduler, and all that their ranks were told."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.told: list[tuple[bytes, msgspec.Struct]] = []
        self.neighbours = Neighbours(self.scheduler, lambda peer, message: self.told.append((peer, message)))

    def join(self, group_id: int, nodes: tuple[str, ...] = ("n",), incarnation: str = "a", shared: bool = True) -> None:
        self.scheduler.add_group(group_id, 64)
        ranks = {}
        for rank, node in enumerate(nodes):
            pool = PoolFile(f"/{group_id}/{incarnation}/{rank}", "", 64) if shared else None
            ranks[_peer(group_id, rank)] = Hello(group_id, incarnation, rank, node, pool)
        self.neighbours.join(group_id, ranks)

    def lose(self, group_id: int) -> None:
        self.scheduler.remove_group(group_id, 0.0)
        self.neighbours.leave(group_id)

    def heard(self) -> list[tuple[bytes, msgspec.Struct]]:
        told = sorted(self.told, key=lambda entry: entry[0])
        self.told.clear()
        return told

    def step(self, group_id: int) -> bool:
        """Whether the group's next step takes blocks of another one along."""
        plan = self.scheduler.schedule(group_id, 0.0)
        assert plan is not None
        rows = sum(chunk.samples for chunk in plan.chunks) + len(plan.decode_slots) // 4
        self.scheduler.apply(group_id, StepResult(plan.step_id, np.full(rows, 7, np.int32).tobytes()), 0.0)
        return bool(plan.block_imports)


def _peer(group_id: int, rank: int = 0) -> bytes:
    return f"{group_id}-{rank}".encode()


def _neighbour(group_id: int, incarnation: str = "a", rank: int = 0) -> Neighbour:
    return Neighbour(group_id, incarnation, PoolFile(f"/{group_id}/{incarnation}/{rank}", "", 64))


def test_ranks_hold_the_pools_of_the_same_ranks_on_their_node() -> None:
    street = Street()
    street.join(0, ("n", "m"))
    street.join(1, ("m", "n"))
    street.join(2, ("n", "m"), shared=False)  # on a GPU
    assert street.heard() == []
    street.join(3, ("n", "m"))
    assert street.heard() == [
        (_peer(0, 0), _neighbour(3, rank=0)),
        (_peer(0, 1), _neighbour(3, rank=1)),
        (_peer(3, 0), _neighbour(0, rank=0)),
        (_peer(3, 1), _neighbour(0, rank=1)),
    ]


def test_streams_count_on_a_pool_once_every_rank_of_a_group_holds_it() -> None:
    for num_holding in (0, 1, 2):
        street = Street()
        street.join(0, ("n", "n"))
        street.scheduler.add(GenerateRequest("r", (5,) * 30, SamplingParams(20, seed=0, ignore_eos=True)), 0.0)
        for _ in range(5):
            assert not street.step(0)
        street.join(1, ("n", "n"))
        street.neighbours.on_holds(1, Holds(0, "before"))  # said of an incarnation that is gone
        for _ in range(num_holding):
            street.neighbours.on_holds(1, Holds(0, "a"))
        street.heard()
        street.lose(0)
        assert bool(street.heard()) == (num_holding < 2)
        assert street.step(1) == (num_holding == 2)
        street.neighbours.tidy()
        assert street.heard() == ([(_peer(1, r), Forget(0)) for r in (0, 1)] if num_holding == 2 else [])


def test_a_pool_is_kept_while_a_stream_waits_for_it_and_not_beyond_the_groups_return() -> None:
    street = Street()
    street.join(0)
    street.scheduler.add(GenerateRequest("r", (5,) * 30, SamplingParams(20, seed=0, ignore_eos=True)), 0.0)
    for _ in range(5):
        street.step(0)
    street.join(1)
    street.neighbours.on_holds(1, Holds(0, "a"))
    street.scheduler.drain_group(1)  # takes nothing new
    street.heard()
    street.lose(0)
    street.neighbours.tidy()
    assert street.heard() == []
    street.join(0, incarnation="b")
    assert street.heard() == [
        (_peer(0), _neighbour(1)),
        (_peer(1), Forget(0)),
        (_peer(1), _neighbour(0, "b")),
    ]
    street.neighbours.on_holds(1, Holds(0, "b"))
    assert not street.step(0)
    street.neighbours.tidy()
    assert street.heard() == []

"""Groups on one host hold each other's KV pools, so that a loss costs a few copies instead of computing all again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orcaserve.cluster.channel import Peer
from orcaserve.cluster.wire import Forget, Hello, Holds, Neighbour, ToRank
from orcaserve.engine.messages import PoolFile
from orcaserve.engine.scheduler import Scheduler


@dataclass(slots=True)
class _Home:
    """A group whose ranks, in their order, all have a pool that can be read."""

    incarnation: str
    ranks: list[Peer]
    node_ids: list[str]
    pools: list[PoolFile]
    holding: Counter[str] = field(default_factory=Counter)  # its ranks that hold the pools of an incarnation


class Neighbours:
    """Tells ranks whose pools to hold, and the scheduler what they can read.

    A lost group's pools are let go of when nothing counts on them any more, or when the group is there again.
    """

    def __init__(self, scheduler: Scheduler, send: Callable[[Peer, ToRank], object]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._homes: dict[int, _Home] = {}
        self._lost: set[int] = set()

    def join(self, group_id: int, ranks: Mapping[Peer, Hello]) -> None:
        """A group begins to step; `ranks` in their order. Groups that are on the same nodes can read each other."""
        if group_id in self._lost:
            self._forget(group_id)
        hellos = list(ranks.values())
        pools = [hello.pool for hello in hellos if hello.pool is not None]
        if len(pools) < len(hellos):
            return
        home = _Home(hellos[0].incarnation, list(ranks), [hello.node_id for hello in hellos], pools)
        for other_id, other in self._homes.items():
            if other.node_ids == home.node_ids:
                self._introduce(group_id, home, other)
                self._introduce(other_id, other, home)
        self._homes[group_id] = home

    def on_holds(self, reader_id: int, holds: Holds) -> None:
        """One rank of a group holds what it was told to."""
        reader, owner = self._homes.get(reader_id), self._homes.get(holds.group_id)
        if reader is None or owner is None or owner.incarnation != holds.incarnation:
            return
        reader.holding[holds.incarnation] += 1
        if reader.holding[holds.incarnation] == len(reader.ranks):
            self._scheduler.share_pool(holds.group_id, reader_id)

    def leave(self, group_id: int) -> None:
        """The scheduler knows that the group is gone."""
        if self._homes.pop(group_id, None) is not None:
            self._lost.add(group_id)
            self.tidy()

    def tidy(self) -> None:
        for group_id in list(self._lost):
            if not self._scheduler.needs_pool(group_id):
                self._forget(group_id)

    def _introduce(self, owner_id: int, owner: _Home, reader: _Home) -> None:
        for rank, pool in zip(reader.ranks, owner.pools, strict=True):
            self._send(rank, Neighbour(owner_id, owner.incarnation, pool))

    def _forget(self, group_id: int) -> None:
        self._lost.discard(group_id)
        self._scheduler.forget_pool(group_id)
        for home in self._homes.values():
            for rank in home.ranks:
                self._send(rank, Forget(group_id))

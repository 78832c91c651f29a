"""Collectives: over shared memory between threads of this process, over gloo between processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rank_groups import rank_pool
from torch import Tensor

from orcaserve.cluster.local import free_port
from orcaserve.workers.errors import PeerLost, RendezvousTimeout
from orcaserve.workers.sharding import even_span
from orcaserve.workers.shared_memory import BUFFER_BYTES, SharedMemoryGroup
from orcaserve.workers.tp import SoloGroup, TpGroup, join

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def on_ranks(size: int, function: Callable[[TpGroup], object], timeout_s: float = 30.0) -> list:
    """function(group) of every rank, each in a thread."""
    address = free_address()

    def run(rank: int) -> object:
        group = join(address, rank, size, "cpu", timeout_s)
        try:
            return function(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return [done.result(60) for done in [pool.submit(run, rank) for rank in range(size)]]


def part(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_reduce_is_the_sum_in_rank_order_rounded_once(size, dtype):
    shapes = [(1, 1), (3, 577), (1, BUFFER_BYTES // dtype.itemsize), (7, 100_003)]

    def reduce(group: TpGroup) -> list[Tensor]:
        assert isinstance(group, SharedMemoryGroup)
        return [group.all_reduce(part(group.rank, *shape).to(dtype)) for shape in shapes]

    expected = []
    for shape in shapes:
        total = part(0, *shape).to(dtype).float()
        for rank in range(1, size):
            total += part(rank, *shape).to(dtype).float()
        expected.append(total.to(dtype))
    for sums in on_ranks(size, reduce):
        assert all(map(torch.equal, sums, expected))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (5, 1001), (3, 49_152), (2, 1_500_001)])
def test_columns_gather_on_rank_0(size, rows, columns):
    whole = part(0, rows, columns)

    def gather(group: TpGroup) -> Tensor | None:
        span = even_span(columns, group.size, group.rank)
        return group.gather_columns(whole[:, span.start : span.stop], columns)

    first, *others = on_ranks(size, gather)
    assert torch.equal(first, whole)
    assert others == [None] * (size - 1)


def test_broadcast_and_many_collectives_in_a_row():
    """Two generations of buffers are enough, whichever rank is ahead."""

    def run(group: TpGroup) -> Tensor:
        x = torch.full((100,), float(group.rank))
        for step in range(300):
            group.all_reduce(x)
            x = group.broadcast(x * (group.rank + 1) / 10 if step % 3 else x)
            group.gather_columns(x[:2].reshape(1, 2), 4)
        return x

    first, second = on_ranks(2, run)
    assert torch.equal(first, second)


def test_a_peer_that_does_not_come_is_an_error_in_time():
    def run(group: TpGroup) -> None:
        if group.rank == 0:
            with pytest.raises(PeerLost, match=r"rank 0 waited 3 s"):
                group.all_reduce(torch.ones(4))

    on_ranks(2, run, timeout_s=3.0)


def test_the_timeout_can_be_changed():
    def run(group: TpGroup) -> None:
        group.set_timeout(0.3)
        if group.rank == 0:
            with pytest.raises(PeerLost, match=r"rank 0 waited 0\.3 s"):
                group.all_reduce(torch.ones(4))

    on_ranks(2, run)


def test_over_gloo_too():
    """Rank 1 comes to the rendezvous and not to the collective."""
    links = rank_pool().links(2)
    address = free_address()
    for rank, link in enumerate(links):
        link.send(("gloo_alone", (address, rank, 2, 0.5)))
    for link in links:
        assert link.poll(60)
        succeeded, value = link.recv()
        assert succeeded, value


@pytest.mark.parametrize("rank", [0, 1])
def test_rendezvous_has_a_deadline(rank):
    with pytest.raises(RendezvousTimeout, match=f"rank {rank} of 2 .* within 1 s"):
        join(free_address(), rank, 2, "cpu", 1.0)


def test_a_group_of_one_needs_nobody():
    assert isinstance(join("", 0, 1, "cpu", 1.0), SoloGroup)


def test_gloo_computes_the_same():
    """What ranks on different hosts use."""
    links = rank_pool().links(3)
    address = free_address()
    for rank, link in enumerate(links):
        link.send(("gloo", (address, rank, 3)))
    answers = []
    for link in links:
        assert link.poll(60)
        succeeded, value = link.recv()
        assert succeeded, value
        answers.append(value)
    total = (
        part(0, 4, 10).bfloat16().float() + part(1, 4, 10).bfloat16().float() + part(2, 4, 10).bfloat16().float()
    ).bfloat16()
    for reduced, _, sent in answers:
        assert torch.equal(torch.tensor(reduced).bfloat16(), total)
        assert sent == [7, 8]
    assert [gathered for _, gathered, _ in answers] == [part(9, 2, 10).tolist(), None, None]

"""The ranks of one tensor-parallel group, as an object that is passed to whoever needs it.

`join` meets the other ranks through a TCP store with a deadline, then picks how they talk: one rank needs nothing;
ranks on one host's CPU share memory; the rest use torch.distributed, NCCL on GPUs and gloo between hosts.
"""

from __future__ import annotations

import datetime
import socket
from typing import Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from orcaserve.kernels import cpu
from orcaserve.workers.errors import RendezvousTimeout
from orcaserve.workers.sharding import even_span
from orcaserve.workers.shared_memory import SharedMemoryGroup


class TpGroup(Protocol):
    """What the layers and the runner ask of the group. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; added up in rank order, so it is bitwise the same on every rank."""
        ...

    def gather_columns(self, shard: Tensor, total: int) -> Tensor | None:
        """[rows, own columns] of every rank side by side, [rows, total], on rank 0; None elsewhere.

        The columns are cut as `even_span` cuts `total`.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place."""
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective waits for the other ranks, from now on."""
        ...

    def close(self) -> None: ...


class SoloGroup:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, shard: Tensor, total: int) -> Tensor:
        assert shard.shape[1] == total
        return shard

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def set_timeout(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class DistributedGroup:
    """NCCL or gloo, through torch.distributed's default process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, backend: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        # NCCL's own order of addition is the same on all ranks; gloo's is not promised, so it is spelled out.
        self._ordered = backend == "gloo"

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._ordered:
            dist.all_reduce(x)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def gather_columns(self, shard: Tensor, total: int) -> Tensor | None:
        widths = [len(even_span(total, self.size, rank)) for rank in range(self.size)]
        padded = torch.nn.functional.pad(shard, (0, widths[0] - shard.shape[1])).contiguous()
        if self.rank != 0:
            dist.gather(padded)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def set_timeout(self, timeout_s: float) -> None:
        # The only way that torch has for a process group that is there already.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s))

    def close(self) -> None:
        dist.destroy_process_group()


def join(init_method: str, rank: int, size: int, device: str, timeout_s: float) -> TpGroup:
    """Meet the other ranks at `tcp://host:port`, where rank 0 listens. Raises RendezvousTimeout."""
    if size == 1:
        return SoloGroup()
    try:
        store = make_store(init_method, rank, size, timeout_s)
        if device == "cuda":
            return DistributedGroup(store, rank, size, "nccl", timeout_s)
        if _on_one_host(store, rank, size) and cpu.available():
            return SharedMemoryGroup(store, rank, size, timeout_s)
        return DistributedGroup(store, rank, size, "gloo", timeout_s)
    except (dist.DistError, TimeoutError) as error:
        raise RendezvousTimeout(
            f"rank {rank} of {size} did not meet the others at {init_method} within {timeout_s:g} s: {error}"
        ) from error


def make_store(init_method: str, rank: int, size: int, timeout_s: float) -> dist.TCPStore:
    """Where the ranks leave word for one another; rank 0 serves it on this address alone."""
    address = urlsplit(init_method)
    assert address.scheme == "tcp", init_method
    assert address.hostname, init_method
    assert address.port, init_method
    timeout = datetime.timedelta(seconds=timeout_s)
    if rank != 0:
        return dist.TCPStore(address.hostname, address.port, size, is_master=False, timeout=timeout)
    # Left to itself the store would listen on every interface of the machine.
    listener = socket.create_server((address.hostname, address.port), backlog=size)
    return dist.TCPStore(
        address.hostname,
        address.port,
        size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _on_one_host(store: dist.TCPStore, rank: int, size: int) -> bool:
    """Whether all ranks run on the machine of rank 0, by the kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        store.set(f"host/{rank}", file.read().strip())
    return len({store.get(f"host/{other}") for other in range(size)}) == 1

"""A tensor-parallel group on one host's CPU: collectives through a piece of memory that all ranks map.

A decode step makes two all-reduces a layer, each of a few kilobytes. gloo spends about a millisecond on one; this
takes a few microseconds plus the wait for the slowest rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

from orcaserve.kernels.cpu.library import library
from orcaserve.workers.errors import PeerLost
from orcaserve.workers.sharding import even_span

MAX_RANKS = 32  # as in kernels/cpu/csrc/shared_memory.c
BUFFER_BYTES = 1 << 20  # of one rank and generation: larger tensors pass in pieces that stay in the cache
NUM_SPINS = 2_000  # looks at a peer's mark before sleeping, about 0.1 ms: longer ones starve who else needs the core


class _Group(ctypes.Structure):
    _fields_ = (
        ("region", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("timeout_s", ctypes.c_double),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("sequence", ctypes.c_uint32),
    )


class SharedMemoryGroup:
    """TpGroup over shared memory. The region has no name once all ranks hold it, so nothing outlives a killed rank.

    `native` is what the C functions know the group by; native code that calls them itself takes it along.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        assert size <= MAX_RANKS, f"{size} ranks on one host, at most {MAX_RANKS} are supported"
        self.rank = rank
        self.size = size
        self._library = library()
        num_bytes = self._library.orca_shm_region_bytes(size, BUFFER_BYTES)
        self._memory = _map(store, rank, size, num_bytes)
        view = ctypes.c_char.from_buffer(self._memory)
        # A rank that spins while the one it waits for has no core to run on would only delay it.
        spins = NUM_SPINS if size <= len(os.sched_getaffinity(0)) else 0
        self.native = _Group(ctypes.addressof(view), BUFFER_BYTES, spins, timeout_s, rank, size, 0)
        self._pointer = ctypes.byref(self.native)
        del view

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        if x.dtype == torch.float16:
            return x.copy_(self.all_reduce(x.float()))
        kind = 1 if x.dtype == torch.bfloat16 else 0
        self._check(self._library.orca_shm_all_reduce(self._pointer, x.data_ptr(), x.numel(), kind))
        return x

    def gather_columns(self, shard: Tensor, total: int) -> Tensor | None:
        shard = shard.contiguous()
        item, rows = shard.element_size(), shard.shape[0]
        starts = [even_span(total, self.size, rank).start * item for rank in range(self.size)] + [total * item]
        out = shard.new_empty(rows, total) if self.rank == 0 else None
        target = 0 if out is None else out.data_ptr()
        offsets = (ctypes.c_int64 * len(starts))(*starts)
        self._check(self._library.orca_shm_gather(self._pointer, shard.data_ptr(), target, rows, offsets))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        self._check(self._library.orca_shm_broadcast(self._pointer, x.data_ptr(), x.numel() * x.element_size()))
        return x

    def set_timeout(self, timeout_s: float) -> None:
        self.native.timeout_s = timeout_s

    def close(self) -> None:
        self._memory.close()

    def _check(self, error: int) -> None:
        if error:
            raise PeerLost(f"rank {self.rank} waited {self.native.timeout_s:g} s for another rank of its group")


def _map(store: dist.Store, rank: int, size: int, num_bytes: int) -> mmap.mmap:
    """The same `num_bytes` of zeroed memory in every rank."""
    if rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="orcaserve-", dir=folder)
        os.posix_fallocate(descriptor, 0, num_bytes)  # fails here, not at some later write, if there is no room
        store.set("shared_memory", path)
    else:
        path = store.get("shared_memory").decode()
        descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    # Rank 0 holds the store, and is the last to need it.
    if rank == 0:
        store.wait([f"mapped/{other}" for other in range(1, size)])
        os.unlink(path)
    else:
        store.set(f"mapped/{rank}", "")
    return memory

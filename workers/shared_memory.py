"""A tensor-parallel group on one host's CPU: collectives through a piece of memory that all ranks map.

A decode step makes two all-reduces a layer, each of a few kilobytes. gloo spends about a millisecond on one; this
takes a few microseconds plus the wait for the slowest rank.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from orcaserve.workers.errors import PeerLost
from orcaserve.workers.sharding import even_span

SOURCE = Path(__file__).with_suffix(".c")
MAX_RANKS = 32  # as in the source
BUFFER_BYTES = 1 << 20  # of one rank and generation: larger tensors pass in pieces that stay in the cache
NUM_SPINS = 20_000  # looks at a peer's mark before sleeping, about 0.3 ms


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
    """TpGroup over shared memory. The region has no name once all ranks hold it, so nothing outlives a killed rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        assert size <= MAX_RANKS, f"{size} ranks on one host, at most {MAX_RANKS} are supported"
        self.rank = rank
        self.size = size
        self._library = _library()
        num_bytes = self._library.shm_region_bytes(size, BUFFER_BYTES)
        self._memory = _map(store, rank, size, num_bytes)
        view = ctypes.c_char.from_buffer(self._memory)
        # A rank that spins while the one it waits for has no core to run on would only delay it.
        spins = NUM_SPINS if size <= len(os.sched_getaffinity(0)) else 0
        self._group = _Group(ctypes.addressof(view), BUFFER_BYTES, spins, timeout_s, rank, size, 0)
        self._pointer = ctypes.byref(self._group)
        del view

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        if x.dtype == torch.float16:
            return x.copy_(self.all_reduce(x.float()))
        kind = 1 if x.dtype == torch.bfloat16 else 0
        self._check(self._library.shm_all_reduce(self._pointer, x.data_ptr(), x.numel(), kind))
        return x

    def gather_columns(self, shard: Tensor, total: int) -> Tensor | None:
        shard = shard.contiguous()
        item, rows = shard.element_size(), shard.shape[0]
        starts = [even_span(total, self.size, rank).start * item for rank in range(self.size)] + [total * item]
        out = shard.new_empty(rows, total) if self.rank == 0 else None
        target = 0 if out is None else out.data_ptr()
        offsets = (ctypes.c_int64 * len(starts))(*starts)
        self._check(self._library.shm_gather(self._pointer, shard.data_ptr(), target, rows, offsets))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        self._check(self._library.shm_broadcast(self._pointer, x.data_ptr(), x.numel() * x.element_size()))
        return x

    def close(self) -> None:
        self._memory.close()

    def _check(self, error: int) -> None:
        if error:
            raise PeerLost(f"rank {self.rank} waited {self._group.timeout_s:g} s for another rank of its group")


def available() -> bool:
    """Whether the C part can be had here: a compiler is all that it takes."""
    return shutil.which("cc") is not None


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
    store.set(f"mapped/{rank}", "")
    for other in range(size):
        store.wait([f"mapped/{other}"])
    if rank == 0:
        os.unlink(path)
    return memory


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_compiled()))
    library.shm_region_bytes.restype = ctypes.c_int64
    library.shm_region_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64]
    pointer = ctypes.c_void_p
    library.shm_all_reduce.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_int]
    library.shm_broadcast.argtypes = [pointer, pointer, ctypes.c_int64]
    library.shm_gather.argtypes = [pointer, pointer, pointer, ctypes.c_int64, pointer]
    return library


def _compiled() -> Path:
    """The shared object of SOURCE, built now unless the cache has it for this very source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = Path.home() / ".cache" / "orcaserve" / "native" / f"{SOURCE.stem}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            options = ["-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11"]
            subprocess.run(["cc", *options, str(SOURCE), "-o", str(built)], check=True)
            built.replace(target)
    return target

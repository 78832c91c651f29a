"""This rank's part of the paged KV pool: how many blocks it can hold, and the tensors where no neighbour reads them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from orcaserve.kernels import cpu
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.errors import NotEnoughMemory
from orcaserve.workers.models.config import ModelConfig
from orcaserve.workers.sharding import RankShard

FREE_MEMORY_SHARE = 0.5  # of what a CPU host has free now, for all ranks on it together
MAX_DEFAULT_BYTES = 4 << 30  # of one CPU rank, unless more is asked for
MIN_BLOCKS = 2
_CGROUP = Path("/sys/fs/cgroup")


class KvShape:
    """The shape of one rank's pool."""

    def __init__(self, config: ModelConfig, shard: RankShard, block_size: int, dtype: torch.dtype) -> None:
        self.num_layers = config.num_layers
        self.block_shape = (len(shard.kv_heads), block_size, config.head_dim)
        self.dtype = dtype
        per_layer = len(shard.kv_heads) * block_size * config.head_dim
        self.block_bytes = 2 * config.num_layers * per_layer * dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One tensor a layer, [2, num_blocks, num_kv_heads, block_size, head_dim]. Pages are touched as blocks are.

        Private to this process; kv_pool.SharedKvPool is the one that neighbours can read.
        """
        shape = (2, num_blocks, *self.block_shape)
        if device.type == "cpu":
            return [_untouched_zeros(shape, self.dtype) for _ in range(self.num_layers)]
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written to; torch.zeros would write 4 GiB at the start.

    Huge pages, where the system has them: blocks lie scattered, and looking up their addresses took a fifth of a decode
    step's attention.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(memory, dtype=dtype).view(shape)
    if cpu.available():
        cpu.advise_huge_pages(zeros)
    return zeros


def num_cpu_blocks(config: WorkerConfig, shape: KvShape) -> int:
    """From kv_cache_memory_bytes, else from a share of the free memory. Raises NotEnoughMemory."""
    if config.kv_cache_memory_bytes:
        num_bytes = config.kv_cache_memory_bytes
        source = f"kv_cache_memory_bytes is {num_bytes}"
        if num_bytes * config.tensor_parallel_size > (total := total_memory_bytes()):
            raise NotEnoughMemory(
                f"no room for a KV pool: {source} for each of {config.tensor_parallel_size} ranks, and all memory of "
                f"this machine is {total} bytes"
            )
    else:
        free = free_memory_bytes()
        num_bytes = min(int(free * FREE_MEMORY_SHARE) // config.tensor_parallel_size, MAX_DEFAULT_BYTES)
        source = f"{free} bytes of memory are free"
    return _enough(num_bytes // shape.block_bytes, shape, source)


def num_gpu_blocks(config: WorkerConfig, shape: KvShape, device: torch.device, forward: Callable[[], None]) -> int:
    """What gpu_memory_utilization leaves beside the weights and a step of full size, which `forward` runs."""
    torch.cuda.reset_peak_memory_stats(device)
    forward()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    used = total - free - reserved + torch.cuda.memory_allocated(device) + activations
    room = int(total * config.gpu_memory_utilization) - used
    source = f"gpu_memory_utilization {config.gpu_memory_utilization} of {total} bytes, of which {used} are in use"
    return _enough(room // shape.block_bytes, shape, source)


def _enough(num_blocks: int, shape: KvShape, source: str) -> int:
    if num_blocks < MIN_BLOCKS:
        raise NotEnoughMemory(
            f"no room for a KV pool: {source}, and {MIN_BLOCKS} blocks of {shape.block_bytes} bytes are the least"
        )
    return num_blocks


def free_memory_bytes() -> int:
    """What the kernel says is available, or what this control group may still take if that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if (limit := _group_limit()) is not None:
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    return max(available, 0)


def total_memory_bytes() -> int:
    """Of the machine, or what this control group may take if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, limit) if (limit := _group_limit()) is not None else total


def _group_limit() -> int | None:
    file = _CGROUP / "memory.max"
    if not file.is_file() or (text := file.read_text().strip()) == "max":
        return None
    return int(text)

"""Memory in huge pages, for what is read from end to end at every step.

Weights of a small model are a few hundred megabytes in matrices of one or two, each read once a step. In pages of 4 KiB
such a read spends a quarter of its time on address translation (measured: 23.5 against 17.5 ms for 269 MB on one core).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from orcaserve.kernels.cpu.library import library

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64


class _Chunk:
    """The piece that the next small request is cut from; it lives as long as a tensor in it does."""

    memory: Tensor = torch.empty(0, dtype=torch.uint8)
    used = 0
    lock = threading.Lock()


def huge_pages(num_bytes: int) -> Tensor:
    """Uninitialised bytes, aligned to a cache line, in huge pages where the system grants them."""
    with _Chunk.lock:
        start = -(-_Chunk.used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > _Chunk.memory.numel():
            _Chunk.memory, start = _chunk(max(num_bytes, CHUNK_BYTES)), 0
        _Chunk.used = start + num_bytes
        return _Chunk.memory[start : start + num_bytes]


def _chunk(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE_BYTES
    advise_huge_pages(memory)
    return memory[first : first + num_bytes]


def advise_huge_pages(memory: Tensor) -> None:
    """Asks for huge pages behind a large tensor that has not been written to yet. The system may ignore it."""
    library().orca_huge_pages(memory.data_ptr(), memory.numel() * memory.element_size())

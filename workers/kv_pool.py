"""A CPU rank's KV pool that its neighbours on the host can read, also after its death.

When a rank is killed, the streams of its group go on in another group. A rank of that group that held the dead one's
pool copies the blocks it needs; computing them again takes seconds.

The pool lies in a memfd: it has no name in any folder, no limit of its own as /dev/shm has, and is gone with its last
holder. Huge pages are mostly off for such memory: attention over it took 3 to 4 % longer than over a private pool.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import PoolFile
from orcaserve.kernels import cpu
from orcaserve.kernels.cpu.memory import HUGE_PAGE_BYTES
from orcaserve.workers.errors import PoolUnreadable
from orcaserve.workers.kv_shard import KvShape


class SharedKvPool:
    """`layers` are as KvShape.allocate returns them; `file` is where a neighbour finds them while this process lives.

    The pools of neighbours are held under the ids of their groups.
    """

    def __init__(self, shape: KvShape, num_blocks: int) -> None:
        name = f"orcaserve-kv-{os.getpid()}-{secrets.token_hex(8)}"
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, _num_bytes(shape, num_blocks))
        memory = mmap.mmap(self._descriptor, _num_bytes(shape, num_blocks))
        if cpu.available():
            cpu.advise_huge_pages(torch.frombuffer(memory, dtype=torch.uint8))
        self.shape = shape
        self.file = PoolFile(f"/proc/{os.getpid()}/fd/{self._descriptor}", name, num_blocks)
        self.layers = _layers(memory, shape, num_blocks)
        self._blocks = _blocks(memory, shape, num_blocks)
        self._held: dict[int, np.ndarray] = {}

    def hold(self, group_id: int, file: PoolFile) -> None:
        """Keep a neighbour's pool of the same shape in reach, in place of what was held under that id.

        Raises PoolUnreadable; then nothing is held under it.
        """
        self.drop(group_id)
        self._held[group_id] = _blocks(_map(file, _num_bytes(self.shape, file.num_blocks)), self.shape, file.num_blocks)

    def drop(self, group_id: int) -> None:
        """Let go of a pool, if it is held. Nothing else refers to its mapping, which goes with it."""
        self._held.pop(group_id, None)

    def drop_all(self) -> None:
        self._held.clear()

    def import_blocks(self, imports: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV block (group whose pool is held, its block, destination) into this pool, K and V of all layers."""
        rows = np.array(imports, np.int64).reshape(-1, 3)
        for group_id in np.unique(rows[:, 0]).tolist():
            assert group_id in self._held, f"the pool of group {group_id} is not held"
            _, sources, destinations = rows[rows[:, 0] == group_id].T
            # Layer by layer, what passes in between stays in the cache: all at once took a third longer.
            for own, theirs in zip(self._blocks, self._held[group_id], strict=True):
                own[:, destinations] = theirs[:, sources]

    def close(self) -> None:
        """Nobody can find this pool any more. Its memory goes with the last tensor in it, here or at a neighbour."""
        self.drop_all()
        os.close(self._descriptor)


def _layer_bytes(shape: KvShape, num_blocks: int) -> int:
    """From the start of one layer to that of the next."""
    used = shape.block_bytes // shape.num_layers * num_blocks
    return -(-used // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _num_bytes(shape: KvShape, num_blocks: int) -> int:
    return shape.num_layers * _layer_bytes(shape, num_blocks)


def _layers(memory: mmap.mmap, shape: KvShape, num_blocks: int) -> list[Tensor]:
    stride = _layer_bytes(shape, num_blocks)
    count = shape.block_bytes // shape.num_layers // shape.dtype.itemsize * num_blocks
    return [
        torch.frombuffer(memory, dtype=shape.dtype, count=count, offset=layer * stride).view(
            2, num_blocks, *shape.block_shape
        )
        for layer in range(shape.num_layers)
    ]


def _blocks(memory: mmap.mmap, shape: KvShape, num_blocks: int) -> np.ndarray:
    """The bytes of K and V, [num_layers, 2, num_blocks, bytes]: numpy knows no bfloat16."""
    size = shape.block_bytes // shape.num_layers // 2
    strides = (_layer_bytes(shape, num_blocks), num_blocks * size, size, 1)
    return np.ndarray((shape.num_layers, 2, num_blocks, size), np.uint8, memory, strides=strides)


def _map(file: PoolFile, num_bytes: int) -> mmap.mmap:
    """A neighbour's pool, read only."""
    try:
        # Not blocking: in a container of its own, this process may find anything at all behind the path.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if found != f"/memfd:{file.name} (deleted)":
                raise PoolUnreadable(f"{file.path} is {found}, not the KV pool {file.name}")
            size = os.fstat(descriptor).st_size
            if size != num_bytes:
                raise PoolUnreadable(f"KV pool {file.name} has {size} bytes, not {num_bytes}: its shape is another")
            return mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PoolUnreadable(f"KV pool {file.name} at {file.path}: {error.strerror}") from error

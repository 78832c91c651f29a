"""A rank that has nothing but its shared KV pool: says where it is, and waits for its end.

python pool_process.py MODEL_DIR DTYPE NUM_BLOCKS
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from orcaserve.workers.kv_pool import SharedKvPool
from orcaserve.workers.kv_shard import KvShape
from orcaserve.workers.models.config import read_config
from orcaserve.workers.models.registry import shards_of


def pool_shape(model_dir: Path, dtype: torch.dtype) -> KvShape:
    model = read_config(model_dir)
    return KvShape(model, shards_of(model, 1)[0], 16, dtype)


def known_values(pool: SharedKvPool) -> list[torch.Tensor]:
    """A layer's tensors, of values that are seldom the same in two places."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(layer.shape, generator=generator).to(layer.dtype) for layer in pool.layers]


def fill(pool: SharedKvPool) -> None:
    for layer, values in zip(pool.layers, known_values(pool), strict=True):
        layer.copy_(values)


if __name__ == "__main__":
    folder, dtype, num_blocks = sys.argv[1:]
    pool = SharedKvPool(pool_shape(Path(folder), getattr(torch, dtype)), int(num_blocks))
    fill(pool)
    print(msgspec.json.encode(pool.file).decode(), flush=True)
    sys.stdin.read()

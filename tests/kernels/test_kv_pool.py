"""What the Triton kernels, interpreted, write into the KV pool: exactly what the references write, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orcaserve.kernels.block_copy import copy_blocks_reference
from orcaserve.kernels.kv_write import kv_write_reference
from tests.kernels.cpu_cases import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(left.nan_to_num(nan=12345.0), right.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 64), (3, 80), (8, 128), (40, 64)])
def test_kv_write(interpreted: Callable[[str], Any], dtype: torch.dtype, heads: tuple[int, int]) -> None:
    num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(head_dim)
    fused = random(generator, 5, 2 * num_kv_heads, head_dim, dtype=dtype)
    k, v = fused[:, :num_kv_heads], fused[:, num_kv_heads:]
    slots = torch.tensor([17, 0, -1, 31, 8])  # a block's first, last and middle place, and a padding token
    pool = torch.full((2, 2, num_kv_heads, 16, head_dim), torch.nan, dtype=dtype)
    expected = pool.clone()
    interpreted("kv").kv_write(k, v, pool, slots)
    kv_write_reference(k, v, expected, slots)
    assert same_bits(pool, expected)
    assert int(expected[:, :, 0, :, 0].isfinite().sum()) == 2 * 4


def test_nothing_to_write(interpreted: Callable[[str], Any]) -> None:
    pool = torch.zeros(2, 1, 1, 4, 64)
    interpreted("kv").kv_write(torch.ones(0, 1, 64), torch.ones(0, 1, 64), pool, torch.zeros(0, dtype=torch.int64))
    interpreted("kv").copy_blocks(pool, torch.zeros(0, 2, dtype=torch.int64))
    assert not pool.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 16, 64), (8, 16, 80)])
def test_copy_blocks(interpreted: Callable[[str], Any], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    pool = random(torch.Generator().manual_seed(0), 2, 6, *shape, dtype=dtype)
    expected = pool.clone()
    pairs = torch.tensor([[5, 0], [2, 4], [5, 3]])  # one source may have two copies
    interpreted("kv").copy_blocks(pool, pairs)
    copy_blocks_reference(expected, pairs)
    assert torch.equal(pool, expected)
    assert torch.equal(pool[:, 0], pool[:, 5])
    assert torch.equal(pool[:, 3], pool[:, 5])

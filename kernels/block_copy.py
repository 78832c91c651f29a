"""Copies whole KV blocks within one layer's pool (copy on write of shared blocks)."""

from __future__ import annotations

from torch import Tensor

from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """kv_cache[:, dst] = kv_cache[:, src] for every row (src, dst) of pairs, int64 [num_pairs, 2].

    No block is a destination twice, nor both a source and a destination.
    """
    operation.implementation(kv_cache.device.type)(kv_cache, pairs)


def copy_blocks_reference(kv_cache: Tensor, pairs: Tensor) -> None:
    kv_cache[:, pairs[:, 1]] = kv_cache[:, pairs[:, 0]]


def _load_triton() -> Implementation:
    from orcaserve.kernels.gpu.kv import copy_blocks

    return copy_blocks


operation = Operation("copy_blocks", copy_blocks_reference, {"triton": _load_triton, "cpu": native_cpu("copy_blocks")})

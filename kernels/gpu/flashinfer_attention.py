"""Paged attention by flashinfer (optional)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.dispatch import CannotRun

WORKSPACE_BYTES = 128 * 2**20  # what flashinfer's own examples give it


def load() -> Callable[..., Tensor]:
    """Raises CannotRun when flashinfer is not installed or does not load beside this torch."""
    try:
        import flashinfer
    except (ImportError, OSError) as error:
        raise CannotRun(f"flashinfer does not load: {error}") from error
    return FlashInferAttention(flashinfer)


class FlashInferAttention:
    """flashinfer plans on the host: once a step for each kind of layer (shape, window, softcap), not once a layer."""

    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer
        self._planned: dict[tuple[Any, ...], tuple[Any, AttentionBatch]] = {}

    def __call__(
        self, q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        kind = (q.device, q.dtype, q.shape[1:], kv_cache.shape[2:4], scale, window, softcap)
        wrapper, planned_for = self._planned.get(kind, (None, None))
        if wrapper is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        if planned_for is not batch:
            num_kv_heads, block_size = kv_cache.shape[2:4]
            wrapper.plan(
                batch.query_start,
                *block_lists(batch, block_size),
                q.shape[1],
                num_kv_heads,
                q.shape[2],
                block_size,
                causal=True,
                sm_scale=scale,
                window_left=window - 1,
                logits_soft_cap=softcap if softcap > 0 else None,
                q_data_type=q.dtype,
                kv_data_type=kv_cache.dtype,
            )
            self._planned[kind] = (wrapper, batch)
        return wrapper.run(q, (kv_cache[0], kv_cache[1]))


def block_lists(batch: AttentionBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The block tables without their unused ends: where each request's ids start, all ids, tokens in the last block."""
    num_blocks = (batch.context_lens + block_size - 1) // block_size
    used = torch.arange(batch.block_tables.shape[1], device=num_blocks.device) < num_blocks.unsqueeze(1)
    starts = functional.pad(num_blocks.cumsum(0, dtype=torch.int32), (1, 0))
    return starts, batch.block_tables[used], (batch.context_lens - 1) % block_size + 1

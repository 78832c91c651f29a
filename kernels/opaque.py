"""The operations that read or write the KV pool, as single nodes of a graph that torch.compile makes.

All others are traced through their references, which inductor fuses; these two would fall apart into loops over
requests. The public functions come here only while a graph is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch


@torch.library.custom_op("orcaserve::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> Tensor:
    from orcaserve.kernels.paged_attention import operation

    batch = AttentionBatch(
        query_start, context_lens, block_tables, slot_mapping, positions, max_query_len, max_context_len
    )
    return operation.implementation(q.device.type, backend)(q, kv_cache, batch, scale, window, softcap)


@paged_attention.register_fake
def _attended(q: Tensor, *_others: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("orcaserve::rope_kv_write", mutates_args=("kv_cache",))
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    from orcaserve.kernels.rope import operation

    batch = AttentionBatch(
        query_start, context_lens, block_tables, slot_mapping, positions, max_query_len, max_context_len
    )
    return operation.implementation(q.device.type)(q, k, v, cos_sin, kv_cache, batch)


@rope_kv_write.register_fake
def _rotated(q: Tensor, *_others: object) -> Tensor:
    return q.new_empty(q.shape)


def columns(batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """A batch as arguments of these nodes."""
    return (
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        batch.slot_mapping,
        batch.positions,
        batch.max_query_len,
        batch.max_context_len,
    )

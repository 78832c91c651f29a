"""The operations of the native library on torch tensors: checks, strides and pointers. Semantics: the references."""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.cpu.library import DTYPES, library

MAX_HEAD_DIM = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    dtype = _dtype("rms_norm", x)
    if weight.dtype != torch.float32:
        raise TypeError(f"rms_norm: weight is {weight.dtype}, not {torch.float32}")
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype)
    native = library().orca_rms_norm
    if residual is None:
        native(dtype, x.data_ptr(), _row_stride(x), None, 0, weight.data_ptr(), out.data_ptr(), None, rows, hidden, eps)
        return out
    _same_dtype("rms_norm", x, residual=residual)
    total = torch.empty((rows, hidden), dtype=x.dtype)
    native(
        dtype,
        x.data_ptr(),
        _row_stride(x),
        residual.data_ptr(),
        _row_stride(residual),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        rows,
        hidden,
        eps,
    )
    return out, total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gate_mul("silu_mul", 0, gate, up)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gate_mul("gelu_tanh_mul", 1, gate, up)


def _gate_mul(name: str, gelu: int, gate: Tensor, up: Tensor) -> Tensor:
    dtype = _dtype(name, gate)
    _same_dtype(name, gate, up=up)
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype)
    library().orca_gate_mul(
        dtype,
        gelu,
        gate.data_ptr(),
        _row_stride(gate),
        up.data_ptr(),
        _row_stride(up),
        out.data_ptr(),
        rows,
        width,
    )
    return out


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
    dtype = _dtype("rope_kv_write", q)
    _same_dtype("rope_kv_write", q, k=k, v=v, kv_cache=kv_cache)
    rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    k_cache, v_cache = _halves(kv_cache)
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype)
    library().orca_rope_kv_write(
        dtype,
        q.data_ptr(),
        _head_row_stride(q),
        k.data_ptr(),
        _head_row_stride(k),
        v.data_ptr(),
        _head_row_stride(v),
        cos_sin.data_ptr(),
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        out.data_ptr(),
        k_cache,
        v_cache,
        rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
    )
    return out


def kv_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    dtype = _dtype("kv_write", k)
    _same_dtype("kv_write", k, v=v, kv_cache=kv_cache)
    rows, num_kv_heads, head_dim = k.shape
    k_cache, v_cache = _halves(kv_cache)
    library().orca_kv_write(
        dtype,
        k.data_ptr(),
        _head_row_stride(k),
        v.data_ptr(),
        _head_row_stride(v),
        slot_mapping.data_ptr(),
        k_cache,
        v_cache,
        rows,
        num_kv_heads,
        head_dim,
        kv_cache.shape[3],
    )


def paged_attention(
    q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    dtype = _dtype("paged_attention", q)
    _same_dtype("paged_attention", q, kv_cache=kv_cache)
    rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    if num_heads % num_kv_heads or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"paged_attention: {num_heads} heads over {num_kv_heads} KV heads of {head_dim} elements; the heads must "
            f"be a multiple of the KV heads and an element count at most {MAX_HEAD_DIM}"
        )
    k_cache, v_cache = _halves(kv_cache)
    tables = batch.block_tables
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype)
    library().orca_paged_attention(
        dtype,
        q.data_ptr(),
        _head_row_stride(q),
        out.data_ptr(),
        k_cache,
        v_cache,
        batch.query_start.data_ptr(),
        batch.context_lens.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        batch.context_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        window,
        softcap,
    )
    return out


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    if not (kv_cache.is_contiguous() and pairs.is_contiguous() and pairs.dtype == torch.int64):
        raise ValueError("copy_blocks: the pool must be contiguous, pairs contiguous int64 [num_pairs, 2]")
    block_bytes = kv_cache[0, 0].numel() * kv_cache.element_size()
    library().orca_copy_blocks(
        kv_cache.data_ptr(), kv_cache.shape[1] * block_bytes, block_bytes, pairs.data_ptr(), pairs.shape[0]
    )


def _dtype(operation: str, x: Tensor) -> int:
    dtype = DTYPES.get(x.dtype)
    if dtype is None:
        raise TypeError(f"{operation}: dtype {x.dtype}, the native kernels take {', '.join(map(str, DTYPES))}")
    return dtype


def _same_dtype(operation: str, x: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(f"{operation}: {name} is {other.dtype}, the input {x.dtype}")


def _row_stride(x: Tensor) -> int:
    """Elements from row to row of [rows, width]; elements of a row lie side by side."""
    row, element = x.stride()
    if element != 1 and x.shape[1] > 1:
        raise ValueError(f"strides {x.stride()}: the elements of a row must lie side by side")
    return row


def _head_row_stride(x: Tensor) -> int:
    """Elements from token to token of [rows, heads, head_dim]; the heads of a token lie side by side."""
    row, head, element = x.stride()
    if element != 1 or (head != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"strides {x.stride()} of {tuple(x.shape)}: the heads of a token must lie side by side")
    return row


def _halves(kv_cache: Tensor) -> tuple[int, int]:
    """Addresses of the pool's K and V. The halves may lie apart; each is contiguous."""
    half_stride, block, head, row, element = kv_cache.stride()
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if (block, head, row, element) != (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1):
        raise ValueError(f"kv_cache strides {kv_cache.stride()} of {tuple(kv_cache.shape)}: K and V must be contiguous")
    start = kv_cache.data_ptr()
    return start, start + half_stride * kv_cache.element_size()

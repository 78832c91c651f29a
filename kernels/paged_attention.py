"""Attention over the flat batch of a step, reading keys and values through block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels import opaque
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """q [num_tokens, num_heads, head_dim] -> the same shape, contiguous; prefill chunks and decodes mixed.

    A token at position p attends to the keys of its own request at positions 0..p, with a window to the last `window`
    of these. Scores are q.k * scale, with a softcap c > 0 then c * tanh(score / c). The keys and values of this step
    are in the pool already. Heads are grouped: num_heads is a multiple of the pool's num_kv_heads. A token with no key
    to attend to (a padding request of context 0) gets zeros. Float32 inside.

    Raises BackendUnavailable when the backend named cannot run here; "auto" picks by the device.
    """
    if torch.compiler.is_compiling():
        return opaque.paged_attention(q, kv_cache, *opaque.columns(batch), scale, window, softcap, backend)
    return operation.implementation(q.device.type, backend)(q, kv_cache, batch, scale, window, softcap)


def paged_attention_reference(
    q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
    for request, context_len in enumerate(context_lens):
        begin, end = starts[request], starts[request + 1]
        if begin < end and context_len > 0:
            k, v = gather_context(kv_cache, batch.block_tables[request], context_len)
            out[begin:end] = _attend(q[begin:end], k, v, scale, window, softcap).to(q.dtype)
    return out


def gather_context(kv_cache: Tensor, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of one request, each [num_kv_heads, context_len, head_dim]."""
    block_size = kv_cache.shape[3]
    blocks = block_table[: -(-context_len // block_size)].long()
    pages = kv_cache[:, blocks].transpose(1, 2)  # [2, num_kv_heads, blocks, block_size, head_dim]
    k, v = pages.flatten(2, 3)[:, :, :context_len]
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    num_queries, context_len = q.shape[0], k.shape[1]
    group = q.shape[1] // k.shape[0]
    k, v = k.float().repeat_interleave(group, 0), v.float().repeat_interleave(group, 0)
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query_at = torch.arange(context_len - num_queries, context_len, device=q.device).unsqueeze(1)
    key_at = torch.arange(context_len, device=q.device)
    seen = key_at <= query_at
    if window > 0:
        seen &= key_at > query_at - window
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def _load_triton() -> Implementation:
    from orcaserve.kernels.gpu.attention import paged_attention

    return paged_attention


def _load_xformers() -> Implementation:
    from orcaserve.kernels.gpu import xformers_attention

    return xformers_attention.load()


def _load_flashinfer() -> Implementation:
    from orcaserve.kernels.gpu import flashinfer_attention

    return flashinfer_attention.load()


operation = Operation(
    "paged_attention",
    paged_attention_reference,
    {
        "triton": _load_triton,
        "xformers": _load_xformers,
        "flashinfer": _load_flashinfer,
        "cpu": native_cpu("paged_attention"),
    },
)

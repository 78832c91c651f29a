"""Paged attention by xformers (optional), through its paged block-diagonal causal bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.dispatch import BackendUnavailable, CannotRun


def load() -> Callable[..., Tensor]:
    """Raises CannotRun when xformers is not installed or does not load beside this torch."""
    try:
        from xformers.ops import fmha
    except (ImportError, OSError) as error:
        raise CannotRun(f"xformers does not load: {error}") from error
    return XformersAttention(fmha)


class XformersAttention:
    """xformers wants a token's heads side by side, our pool keeps a head's tokens together: so every KV head of a block
    counts as a page of its own, and every KV head of a request as a request of its own, with one KV head."""

    def __init__(self, fmha: Any) -> None:
        self._fmha = fmha
        self._batch: AttentionBatch | None = None  # whose bias was made last: all layers of a step share it
        self._bias: Any = None

    def __call__(
        self, q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        if window > 0 or softcap > 0:
            reason = f"its paged bias has neither window ({window}) nor softcap ({softcap})"
            raise BackendUnavailable("paged_attention", "xformers", q.device.type, reason)
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = kv_cache.shape[2:4]
        group = num_heads // num_kv_heads
        if self._batch is not batch:
            self._batch, self._bias = batch, self._make_bias(split_by_head(batch, num_kv_heads), block_size, q.device)
        queries = queries_by_head(q, num_kv_heads).unflatten(1, (1, group)).unsqueeze(0)
        keys, values = kv_cache.view(2, 1, -1, 1, 1, head_dim).expand(-1, -1, -1, -1, group, -1)
        out = self._fmha.memory_efficient_attention_forward(queries, keys, values, attn_bias=self._bias, scale=scale)
        by_head = out.view(num_kv_heads, num_tokens, group, head_dim)
        return by_head.transpose(0, 1).reshape(num_tokens, num_heads, head_dim)

    def _make_bias(self, batch: AttentionBatch, block_size: int, device: Any) -> Any:
        bias = self._fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        return bias.from_seqlens(
            batch.query_start.diff().tolist(),
            batch.context_lens.tolist(),
            batch.block_tables,
            block_size,
            device=device,
        )


def queries_by_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[num_tokens, num_heads, head_dim] -> [num_kv_heads * num_tokens, group, head_dim]."""
    return q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(0, 1)


def split_by_head(batch: AttentionBatch, num_kv_heads: int) -> AttentionBatch:
    """The same batch with one request for each (KV head, request), over a pool of num_blocks * num_kv_heads blocks."""
    lens = batch.query_start.diff().repeat(num_kv_heads)
    heads = torch.arange(num_kv_heads, dtype=torch.int32, device=lens.device).view(-1, 1, 1)
    return replace(
        batch,
        query_start=functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
        context_lens=batch.context_lens.repeat(num_kv_heads),
        block_tables=(batch.block_tables * num_kv_heads + heads).flatten(0, 1),
    )

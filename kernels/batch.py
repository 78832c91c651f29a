"""The shape of one flat batch, as the attention and KV-write kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step: the tokens of all requests one after the other, no padding.

    Request r owns tokens [query_start[r], query_start[r + 1]); they are the last ones of its context, whose
    `context_lens[r]` tokens (this step's included) lie in the KV blocks `block_tables[r]`. A decode has one token.

    The KV pool of one layer is one tensor [2, num_blocks, num_kv_heads, block_size, head_dim]: K is [0], V is [1].
    """

    query_start: Tensor  # int32 [num_requests + 1]
    context_lens: Tensor  # int32 [num_requests]
    block_tables: Tensor  # int32 [num_requests, max_blocks]; entries past the context are never read
    slot_mapping: Tensor  # int64 [num_tokens]: block_id * block_size + offset where each token's K and V go
    positions: Tensor  # int64 [num_tokens]: each token's position in its request
    max_query_len: int
    max_context_len: int

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]

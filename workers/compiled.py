"""The forward pass of a step of decodes alone, compiled by torch's inductor as one graph."""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.workers.models.decoder import Decoder


class CompiledDecode:
    """Norms, gates and products are inductor's; attention and the KV write stay our kernels (kernels/opaque.py).

    Prompts are left to the eager forward pass: their shapes have too many special cases (a compilation each, of ten
    seconds and more) to meet them all before the first request. Those of decodes are four, and `warm_up` does them.
    """

    def __init__(self, model: Decoder) -> None:
        self._run = torch.compile(model.forward, dynamic=True, fullgraph=True)

    def __call__(self, ids: Tensor, batch: AttentionBatch, rows: None) -> Tensor:
        return self._run(ids, batch, rows)

    def warm_up(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        """One request and several, whose context is one block and several: torch compiles ones by themselves."""
        for num_requests in sorted({1, min(2, max_num_seqs), max_num_seqs}):
            for width in sorted({1, min(2, max_blocks), max_blocks}):
                self._run(*_padding(num_requests, width, device), None)


def _padding(num_requests: int, width: int, device: torch.device) -> tuple[Tensor, AttentionBatch]:
    """Decodes that read no key and write none."""

    def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    batch = AttentionBatch(
        query_start=torch.arange(num_requests + 1, dtype=torch.int32, device=device),
        context_lens=full(0, num_requests),
        block_tables=full(0, num_requests, width),
        slot_mapping=full(-1, num_requests, dtype=torch.int64),
        positions=full(0, num_requests, dtype=torch.int64),
        max_query_len=1,
        max_context_len=2,
    )
    return full(0, num_requests, dtype=torch.int64), batch

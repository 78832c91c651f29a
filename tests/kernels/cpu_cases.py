"""Random batches over a scattered KV pool, for the tests of the CPU kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from orcaserve.kernels import cpu
from orcaserve.kernels.batch import AttentionBatch

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def batch_of(
    generator: torch.Generator, query_lens: Sequence[int], context_lens: Sequence[int], block_size: int
) -> tuple[AttentionBatch, int]:
    """(a batch whose blocks lie in random places, the number of blocks of its pool)."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    places = torch.randperm(sum(num_blocks) + 2, generator=generator).int()
    tables = torch.full((len(context_lens), max(num_blocks, default=0) + 1), -1, dtype=torch.int32)
    slots, positions, used = [], [], 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        tables[row, : num_blocks[row]] = places[used : used + num_blocks[row]]
        used += num_blocks[row]
        at = torch.arange(context_len - query_len, context_len)
        positions.append(at)
        slots.append(tables[row][at // block_size].long() * block_size + at % block_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionBatch(
        starts,
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        torch.cat(slots),
        torch.cat(positions),
        max(query_lens),
        max(context_lens),
    )
    return batch, sum(num_blocks) + 2


def pool_of(
    generator: torch.Generator,
    batch: AttentionBatch,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """A pool with NaN wherever no context of the batch reaches."""
    pool = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    for table, context_len in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        at = torch.arange(context_len)
        blocks, offsets = table[at // block_size].long(), at % block_size
        values = random(generator, 2, context_len, num_kv_heads, head_dim, dtype=dtype)
        for half in range(2):
            pool[half, blocks, :, offsets] = values[half]
    return pool


def one_request(batch: AttentionBatch, row: int, begin: int, end: int) -> AttentionBatch:
    """The queries [begin, end) of one request of the batch as a batch of their own."""
    query_len = int(batch.query_start[row + 1] - batch.query_start[row])
    context_len = int(batch.context_lens[row]) - (query_len - end)
    tokens = slice(int(batch.query_start[row]) + begin, int(batch.query_start[row]) + end)
    return AttentionBatch(
        torch.tensor([0, end - begin], dtype=torch.int32),
        torch.tensor([context_len], dtype=torch.int32),
        batch.block_tables[row : row + 1],
        batch.slot_mapping[tokens],
        batch.positions[tokens],
        end - begin,
        context_len,
    )


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = cpu.num_threads()
    cpu.set_num_threads(count)
    try:
        yield
    finally:
        cpu.set_num_threads(before)

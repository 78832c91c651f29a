"""A StepPlan and the slot table, as the flat arrays of one model step. Plain numpy, no loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import StepPlan
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.workers.slots import SlotTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes: requests are the plan's chunks in order, then its decode slots in order."""

    slots: np.ndarray  # int32 [num_requests]
    query_start: np.ndarray  # int32 [num_requests + 1]
    starts: np.ndarray  # int32 [num_requests]: position of each request's first token
    positions: np.ndarray  # int64 [num_tokens]
    input_ids: np.ndarray  # int64 [num_tokens]
    slot_mapping: np.ndarray  # int64 [num_tokens]
    block_tables: np.ndarray  # int32 [num_requests, max blocks of this step]
    sampled: np.ndarray  # int64: requests that sample, by their place in `slots`
    num_chunks: int

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def context_lens(self) -> np.ndarray:
        return (self.starts + np.diff(self.query_start)).astype(np.int32)

    def attention(self, device: torch.device) -> AttentionBatch:
        context_lens = self.context_lens
        return AttentionBatch(
            query_start=on(device, self.query_start),
            context_lens=on(device, context_lens),
            block_tables=on(device, self.block_tables),
            slot_mapping=on(device, self.slot_mapping),
            positions=on(device, self.positions),
            max_query_len=int(np.diff(self.query_start).max()),
            max_context_len=int(context_lens.max()),
        )


def build_batch(plan: StepPlan, slots: SlotTable, drafts: Sequence[np.ndarray] | None = None) -> StepBatch | None:
    """The batch of a plan that is already applied to the slot table; None if the plan computes nothing.

    drafts: for each decode slot the token ids to verify after its newest one. They are laid into the slot table
    behind the known tokens, where the next sampled ids overwrite them.
    """
    decodes = np.frombuffer(plan.decode_slots, np.int32)
    num_chunks = len(plan.chunks)
    if num_chunks + len(decodes) == 0:
        return None
    decode_starts = slots.num_tokens[decodes] - 1
    decode_counts = np.ones(len(decodes), np.int32)
    if drafts is not None:
        decode_counts += _lay_out(drafts, decodes, slots)
    if num_chunks:
        chunks = np.array([(c.slot, c.start, c.num_tokens, c.samples) for c in plan.chunks], np.int32)
        rows = np.concatenate([chunks[:, 0], decodes])
        starts = np.concatenate([chunks[:, 1], decode_starts])
        counts = np.concatenate([chunks[:, 2], decode_counts])
        sampled = np.concatenate([np.flatnonzero(chunks[:, 3]), np.arange(num_chunks, len(rows))])
    else:
        rows, starts, counts = decodes, decode_starts, decode_counts
        sampled = np.arange(len(rows))
    return _flatten(slots, rows, starts, counts, sampled, num_chunks)


def _flatten(
    slots: SlotTable, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, sampled: np.ndarray, num_chunks: int
) -> StepBatch:
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    num_tokens = int(query_start[-1])
    if num_tokens == len(rows):  # one token each: the steady state
        token_rows, positions = rows, starts.astype(np.int64)
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], counts)
    block_size = slots.block_size
    blocks, places = np.divmod(positions, block_size)
    max_blocks = -(-int((starts + counts).max()) // block_size)
    return StepBatch(
        slots=rows,
        query_start=query_start,
        starts=starts,
        positions=positions,
        input_ids=slots.token_ids[token_rows, positions].astype(np.int64),
        slot_mapping=slots.block_tables[token_rows, blocks].astype(np.int64) * block_size + places,
        block_tables=slots.block_tables[rows, :max_blocks],
        sampled=sampled,
        num_chunks=num_chunks,
    )


def _lay_out(drafts: Sequence[np.ndarray], decodes: np.ndarray, slots: SlotTable) -> np.ndarray:
    """Put the drafts behind the known tokens; how many there are for each slot."""
    assert len(drafts) == len(decodes)
    counts = np.fromiter((len(draft) for draft in drafts), np.int32, len(drafts))
    if counts.any():
        rows = np.repeat(decodes, counts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        slots.token_ids[rows, np.repeat(slots.num_tokens[decodes], counts) + offsets] = np.concatenate(drafts)
    return counts


def on(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

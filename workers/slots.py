"""A worker's memory of the running batch: one row per slot, in plain numpy columns."""

from __future__ import annotations

import numpy as np

from orcaserve.engine.messages import NewSlot, SlotKv, StepPlan
from orcaserve.engine.sampling import SamplingParams


class SlotTable:
    """What a worker knows of each slot; the KV shard apart, this is all the state that a worker has.

    Rows change only through `apply_plan` (the scheduler's word) and `append` (tokens sampled here).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)  # known: prompt and sampled
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.choice_index = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)  # by chunks; max_model_len once a prompt's last one was
        self.roots = [b""] * max_num_seqs
        self.sampling: list[SamplingParams | None] = [None] * max_num_seqs

    def apply_plan(self, plan: StepPlan) -> None:
        """Free, fill and extend rows as the plan says; imported and copied blocks and tokens are the runner's."""
        for slot in plan.freed_slots:
            self.num_tokens[slot] = self.num_blocks[slot] = 0
            self.sampling[slot] = None
        for new in plan.new_slots:
            self._fill(new)
        slots = np.frombuffer(plan.table_slots, np.int32)
        for slot, block in zip(slots.tolist(), np.frombuffer(plan.table_blocks, np.int32).tolist(), strict=True):
            self.block_tables[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1
        for chunk in plan.chunks:
            self.num_computed[chunk.slot] = self.max_model_len if chunk.samples else chunk.start + chunk.num_tokens

    def kept(self) -> list[SlotKv]:
        """Of every slot the whole blocks whose KV is there, once all plans that came have been carried out."""
        kept = []
        for slot in np.flatnonzero(self.num_tokens).tolist():
            # The last token that was sampled has not been through the model.
            num_tokens = min(self.num_computed[slot], self.num_tokens[slot] - 1)
            num_blocks = num_tokens // self.block_size
            if num_blocks:
                ids = self.token_ids[slot, : num_blocks * self.block_size].tobytes()
                kept.append(SlotKv(self.roots[slot], ids, self.block_tables[slot, :num_blocks].tobytes()))
        return kept

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of these (distinct) slots."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def _fill(self, new: NewSlot) -> None:
        ids = np.frombuffer(new.token_ids, np.int32)
        self.token_ids[new.slot, : len(ids)] = ids
        self.num_tokens[new.slot] = len(ids)
        self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
        self.num_blocks[new.slot] = 0
        self.num_computed[new.slot] = 0
        self.roots[new.slot] = new.root
        self.choice_index[new.slot] = new.choice_index
        self.sampling[new.slot] = new.sampling

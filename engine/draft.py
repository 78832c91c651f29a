"""One step under construction, and the record of it that stays behind while workers run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orcaserve.engine.decode_batch import NO_DECODES, DecodeStep
from orcaserve.engine.messages import Chunk, NewSlot, StepPlan
from orcaserve.engine.request import Request


class ChunkRow(NamedTuple):
    """A chunk of the plan and whose it is; the slot may belong to another by the time the result comes."""

    request: Request
    chunk: Chunk


@dataclass(slots=True)
class StepRecord:
    """What the scheduler must know to apply a step's result."""

    step_id: int
    planned_s: float
    chunks: list[ChunkRow]
    decodes: DecodeStep
    num_tokens: int
    ends: list[Request] = field(default_factory=list)  # whose last token, by length, this step samples


class PlanDraft:
    """Collects one StepPlan under the token budget."""

    def __init__(self, budget: int) -> None:
        self.budget_left = budget
        self.preempted = False
        self.decodes = NO_DECODES
        self.chunks: list[ChunkRow] = []
        self.num_draft_tokens = 0
        self._budget = budget
        self._new_slots: list[NewSlot] = []
        self._copies: list[tuple[int, int]] = []
        self._imports: list[tuple[int, int, int]] = []
        self._table_slots: list[int] = []
        self._table_blocks: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self._budget - self.budget_left

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decodes.rows

    def add_decodes(self, decodes: DecodeStep, num_draft_tokens: int = 0) -> None:
        self.decodes = decodes
        self.num_draft_tokens = num_draft_tokens
        self.budget_left -= len(decodes.rows) * (1 + num_draft_tokens)
        assert self.budget_left >= 0, f"{len(decodes.rows)} decodes exceed the budget of {self._budget}"

    def add_block(self, slot: int, block: int) -> None:
        self._table_slots.append(slot)
        self._table_blocks.append(block)

    def add_slot(self, request: Request, copy: tuple[int, int] | None = None) -> None:
        """A request starts here, with the blocks that it has."""
        self._new_slots.append(request.as_new_slot())
        self._table_slots.extend([request.slot] * len(request.blocks))
        self._table_blocks.extend(request.blocks)
        if copy is not None:
            self._copies.append(copy)

    def add_imports(self, group_id: int, pairs: list[tuple[int, int]]) -> None:
        """Blocks of a lost group that a request goes on from: (source, destination)."""
        self._imports.extend((group_id, source, target) for source, target in pairs)

    def add_chunk(self, request: Request, num_tokens: int) -> bool:
        """The next `num_tokens` that the request owes; whether these are the last ones, after which it samples."""
        start = request.num_computed
        samples = start + num_tokens == request.num_tokens
        self.chunks.append(ChunkRow(request, Chunk(request.slot, start, num_tokens, samples)))
        self.budget_left -= num_tokens
        assert self.budget_left >= 0, f"a chunk of {num_tokens} exceeds the budget of {self._budget}"
        request.num_computed = start + num_tokens
        return samples

    def plan(self, step_id: int, freed_slots: list[int]) -> StepPlan:
        return StepPlan(
            step_id,
            freed_slots,
            self._new_slots,
            np.array(self._table_slots, np.int32).tobytes() if self._table_slots else b"",
            np.array(self._table_blocks, np.int32).tobytes() if self._table_blocks else b"",
            self._copies,
            [row.chunk for row in self.chunks],
            self.decodes.slots,
            self.num_draft_tokens,
            self._imports,
        )

    def record(self, step_id: int, now_s: float) -> StepRecord:
        return StepRecord(step_id, now_s, self.chunks, self.decodes, self.num_tokens, list(self.decodes.ending))

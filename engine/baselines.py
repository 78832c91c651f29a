"""Request-level (static) batching, the way before iteration-level scheduling: the baseline to measure against.

A batch is formed, padded, and run until its longest member is done; meanwhile nobody enters and nobody's place is
given away. The padding is not only counted: workers compute it, so that a measurement pays for it.

- Prompts are padded to the longest of the batch: before its real prompt a row computes as many filler tokens as it is
  shorter, in the blocks that its own tokens overwrite afterwards.
- A row whose request has ended goes on decoding until the last one has; its tokens are dropped. Past the end of its own
  blocks it writes into one scratch block.

In its favour: a batch starts with whoever waits (it does not wait to be full), tokens are handed out as they come
(not when the batch ends), a batch's first tokens may come while its last prompts are still computed, and steps are
planned ahead as the real scheduler's are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.desk import Desk
from orcaserve.engine.messages import Chunk, NewSlot, StepPlan, StepResult
from orcaserve.engine.outbox import Deltas
from orcaserve.engine.policy import FcfsQueue
from orcaserve.engine.request import Request, State
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.stats import GroupStats, SchedulerStats

FILLER = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass
class Piece:
    """A run of tokens that a row still has to compute: filler, or its prompt."""

    row: int
    num_tokens: int
    start: int = 0


@dataclass
class FlightRecord:
    step_id: int
    planned_s: float
    num_tokens: int
    num_prompt: int
    num_filler: int
    rows: list[int]  # those that sample, in the order of the result


class StaticBatch:
    """Row i of the batch is slot i. All rows go on until the last request has ended."""

    def __init__(self, requests: list[Request], num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.requests = requests
        self.longest = max(request.num_tokens for request in requests)
        self.num_planned = [request.num_tokens for request in requests]  # tokens once all planned steps are done
        self.filler = [
            Piece(i, self.longest - r.num_tokens) for i, r in enumerate(requests) if r.num_tokens < self.longest
        ]
        self.prompts = [Piece(i, r.num_tokens) for i, r in enumerate(requests)]
        self.with_filler = {piece.row for piece in self.filler}
        self._max_model_len = max_model_len
        self._tables = self._lay_out(num_blocks, block_size)

    @staticmethod
    def own_blocks(request: Request, longest: int, block_size: int) -> int:
        """For its tokens, and for the filler that is computed in the same place."""
        return -(-max(request.max_len, longest - request.num_tokens) // block_size)

    def _lay_out(self, num_blocks: int, block_size: int) -> list[list[int]]:
        """A table for each row: its own blocks, then the scratch block (the last of the pool) as far as it may run."""
        steps = max(request.max_len - request.num_tokens for request in self.requests)
        scratch = num_blocks - 1
        tables, next_block = [], 0
        for request in self.requests:
            own = min(self.own_blocks(request, self.longest, block_size), scratch)
            reach = -(-min(self._max_model_len, request.num_tokens + steps) // block_size)
            tables.append([*range(next_block, next_block + own), *[scratch] * (reach - own)])
            next_block += own
        return tables

    @property
    def finished(self) -> bool:
        return all(request.state is State.FINISHED for request in self.requests)

    @property
    def num_left(self) -> int:
        return sum(request.state is not State.FINISHED for request in self.requests)

    def may_go_on(self) -> bool:
        """Whether some request needs a token that no planned step samples."""
        return any(
            request.state is not State.FINISHED and planned < request.max_len
            for request, planned in zip(self.requests, self.num_planned, strict=True)
        )

    def decoding_rows(self) -> list[int]:
        """All of them, but for rows that stand at the model's own limit."""
        return [row for row, planned in enumerate(self.num_planned) if planned <= self._max_model_len]

    def new_slot(self, row: int) -> NewSlot:
        request = self.requests[row]
        request.slot = row
        return request.as_new_slot()

    def filler_slot(self, row: int) -> NewSlot:
        length = self.longest - self.requests[row].num_tokens
        ids = np.array(
            (self.requests[row].token_ids * (1 + length // self.requests[row].num_tokens))[:length], np.int32
        )
        return NewSlot(row, ids.tobytes(), length, FILLER)

    def table(self, row: int) -> list[int]:
        return self._tables[row]


class StaticGroup:
    """One group: at most one batch at a time."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, one of them scratch, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.draining = False
        self.batch: StaticBatch | None = None
        self.slots_in_use: list[int] = []  # by a batch that is over, until the workers are told
        self.in_flight: deque[FlightRecord] = deque()
        self.step_s = 0.0

    @property
    def num_free_slots(self) -> int:
        return 0 if self.batch is not None else self.num_slots


class StaticBatchScheduler(Desk):
    """Same calls as Scheduler; batch size is `max_num_seqs`, order is first come, first served, no prefix cache."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._groups: dict[int, StaticGroup] = {}
        super().__init__(config, FcfsQueue(), self._groups)
        self._next_step_id = 0

    def add_group(self, group_id: int, num_blocks: int) -> None:
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is here already")
        slots = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self._groups[group_id] = StaticGroup(num_blocks, slots)

    def drain_group(self, group_id: int) -> None:
        if group_id in self._groups:
            self._groups[group_id].draining = True

    def remove_group(self, group_id: int, now_s: float) -> Deltas:
        """Its batch waits again with the ids that it has."""
        group = self._groups.pop(group_id, None)
        for request in group.batch.requests if group is not None and group.batch is not None else []:
            if request.state is State.RUNNING:
                request.state = State.WAITING
                request.prompt_logprobs = []
                self._queue.push(request)
                self._counters.num_migrations += 1
        return self._outbox.take()

    def schedule(self, group_id: int, now_s: float) -> StepPlan | None:
        group = self._groups.get(group_id)
        if group is None or len(group.in_flight) >= self.config.max_steps_in_flight:
            return None
        self._expire(now_s)
        if group.batch is not None and group.batch.finished and not group.in_flight:
            group.slots_in_use = list(range(len(group.batch.requests)))
            group.batch = None
        if group.batch is None and not group.draining:
            self._form_batch(group, now_s)
        if group.batch is None:
            return None
        if group.batch.filler:
            return self._plan_filler(group, group.batch, now_s)
        if group.batch.prompts:
            return self._plan_prompts(group, group.batch, now_s)
        if group.batch.may_go_on():
            return self._plan_decodes(group, group.batch, now_s)
        return None

    def _form_batch(self, group: StaticGroup, now_s: float) -> None:
        chosen: list[Request] = []
        while len(chosen) < group.num_slots and (request := self._queue.pop(now_s)) is not None:
            if not self._fits([*chosen, request], group):
                self._queue.put_back(request)
                break
            if request.siblings:
                self._queue_siblings(request)
            request.state = State.RUNNING
            request.queue_s = now_s - request.arrival_s
            chosen.append(request)
        if chosen:
            group.batch = StaticBatch(chosen, group.num_blocks, self.config.block_size, self.config.max_model_len)

    def _queue_siblings(self, request: Request) -> None:
        """Nothing is shared here: each choice computes the prompt for itself."""
        for sibling in request.siblings:
            self._queue.push(sibling)
        request.siblings = []

    def _fits(self, requests: list[Request], group: StaticGroup) -> bool:
        """A request alone always fits: where its blocks run out it ends with "length"."""
        size = self.config.block_size
        longest = max(request.num_tokens for request in requests)
        if len(requests) == 1:
            requests[0].max_len = min(requests[0].max_len, max(longest + 1, (group.num_blocks - 1) * size))
            return True
        return sum(StaticBatch.own_blocks(r, longest, size) for r in requests) < group.num_blocks

    # Plans

    def _plan_filler(self, group: StaticGroup, batch: StaticBatch, now_s: float) -> StepPlan:
        chunks, new = self._cut(batch.filler)
        slots = [batch.filler_slot(row) for row in new]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        freed, group.slots_in_use = group.slots_in_use, []
        return self._launch(group, batch, now_s, freed, slots, chunks, [], num_tokens)

    def _plan_prompts(self, group: StaticGroup, batch: StaticBatch, now_s: float) -> StepPlan:
        chunks, new = self._cut(batch.prompts)
        freed, group.slots_in_use = group.slots_in_use, []
        freed += [row for row in new if row in batch.with_filler]
        chunks = [
            Chunk(c.slot, c.start, c.num_tokens, c.start + c.num_tokens == batch.requests[c.slot].num_tokens)
            for c in chunks
        ]
        return self._launch(group, batch, now_s, freed, [batch.new_slot(row) for row in new], chunks, [], 0)

    def _plan_decodes(self, group: StaticGroup, batch: StaticBatch, now_s: float) -> StepPlan:
        return self._launch(group, batch, now_s, [], [], [], batch.decoding_rows(), 0)

    def _cut(self, pieces: list[Piece]) -> tuple[list[Chunk], list[int]]:
        """Chunks for one step off the front of the pieces, and the rows that begin with it."""
        budget = self.config.max_num_batched_tokens
        chunks, new = [], []
        while pieces and budget:
            piece = pieces[0]
            num_tokens = min(piece.num_tokens, budget)
            if piece.start == 0:
                new.append(piece.row)
            chunks.append(Chunk(piece.row, piece.start, num_tokens, False))
            budget -= num_tokens
            piece.start += num_tokens
            piece.num_tokens -= num_tokens
            if not piece.num_tokens:
                pieces.pop(0)
        return chunks, new

    def _launch(
        self,
        group: StaticGroup,
        batch: StaticBatch,
        now_s: float,
        freed: list[int],
        new: list[NewSlot],
        chunks: list[Chunk],
        decodes: list[int],
        num_filler: int,
    ) -> StepPlan:
        step_id = self._next_step_id
        self._next_step_id += 1
        table = [(slot.slot, block) for slot in new for block in batch.table(slot.slot)]
        sampling = [chunk.slot for chunk in chunks if chunk.samples] + decodes
        num_chunked = sum(chunk.num_tokens for chunk in chunks)
        for row in sampling:
            batch.num_planned[row] += 1
        group.in_flight.append(
            FlightRecord(step_id, now_s, num_chunked + len(decodes), num_chunked - num_filler, num_filler, sampling)
        )
        return StepPlan(
            step_id,
            freed,
            new,
            np.array([slot for slot, _ in table], np.int32).tobytes(),
            np.array([block for _, block in table], np.int32).tobytes(),
            [],
            chunks,
            np.array(decodes, np.int32).tobytes(),
        )

    # Results

    def apply(self, group_id: int, result: StepResult, now_s: float) -> Deltas:
        group = self._groups.get(group_id)
        if group is None or not group.in_flight or result.step_id < group.in_flight[0].step_id:
            return self._outbox.take()
        record = group.in_flight.popleft()
        assert record.step_id == result.step_id, f"result of step {result.step_id} before that of {record.step_id}"
        assert group.batch is not None, "a result and no batch"
        self._meter.add(record.num_tokens, record.planned_s, now_s)
        group.step_s = now_s - record.planned_s
        self._counters.num_steps += 1
        self._counters.padding_tokens += record.num_filler
        self._counters.prompt_tokens += record.num_prompt
        requests = group.batch.requests
        for slot, logprobs in result.prompt_logprobs.items():
            requests[slot].prompt_logprobs.extend(logprobs)
        for row, token in zip(record.rows, np.frombuffer(result.token_ids, np.int32).tolist(), strict=True):
            self._append(requests[row], row, token, result)
        return self._outbox.take()

    def _append(self, request: Request, row: int, token: int, result: StepResult) -> None:
        if request.state is State.FINISHED:
            self._counters.padding_tokens += 1
        elif row in result.failed:
            self._ledger.end(request, "error", result.failed[row])
        else:
            kept, reason, stop_token = request.take([token])
            self._outbox.tokens(request, kept, reason, stop_token, result.logprobs.get(row))
            self._counters.generation_tokens += 1
            if reason is not None:
                self._ledger.close(request, reason)

    def has_work(self, group_id: int) -> bool:
        group = self._groups.get(group_id)
        if group is None:
            return False
        running = group.batch is not None and not (group.batch.finished and not group.in_flight)
        return running or (len(self._queue) > 0 and not group.draining)

    def stats(self) -> SchedulerStats:
        return self._stats([self._group_stats(group_id, group) for group_id, group in self._groups.items()])

    def _group_stats(self, group_id: int, group: StaticGroup) -> GroupStats:
        running = group.batch.num_left if group.batch is not None else 0
        used = 0
        if group.batch is not None and not group.batch.finished:
            used = len({block for row in range(len(group.batch.requests)) for block in group.batch.table(row)})
        return GroupStats(
            group_id=group_id,
            running=running,
            num_slots=group.num_slots,
            total_blocks=group.num_blocks,
            used_blocks=used,
            cached_blocks=0,
            free_blocks=group.num_blocks - used,
            owed_tokens=running,
            steps_in_flight=len(group.in_flight),
            step_s=group.step_s,
            draining=group.draining,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between two calls."""
        running = {
            id(request)
            for group in self._groups.values()
            if group.batch is not None
            for request in group.batch.requests
            if request.state is State.RUNNING
        }
        for request in self._ledger:
            assert request.state is not State.FINISHED, f"{request.request_id} has ended and is still here"
            assert (request.state is State.RUNNING) == (id(request) in running), f"{request.request_id} runs nowhere"

"""Runs the steps of one rank: plan in, tokens out. Every rank makes the same calls; rank 0 alone samples."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import StepPlan, StepResult, TokenLogprobs
from orcaserve.kernels.block_copy import copy_blocks
from orcaserve.workers.batch import StepBatch, build_batch, on
from orcaserve.workers.compiled import CompiledDecode
from orcaserve.workers.graphs import DecodeGraphs
from orcaserve.workers.kv_pool import SharedKvPool
from orcaserve.workers.models.decoder import Decoder
from orcaserve.workers.sampler import Sampled, Sampler
from orcaserve.workers.slots import SlotTable
from orcaserve.workers.speculation import Drafter
from orcaserve.workers.tp import TpGroup

Drafts = list[np.ndarray]  # of each decode slot


class ModelRunner:
    """`sampler` is there on rank 0 alone, `kv_pool` where the model's pool is shared with neighbours."""

    def __init__(
        self,
        model: Decoder,
        tp: TpGroup,
        slots: SlotTable,
        sampler: Sampler | None,
        *,
        device: torch.device,
        kv_pool: SharedKvPool | None = None,
        drafter: Drafter | None = None,
        graphs: DecodeGraphs | None = None,
        compiled: CompiledDecode | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert (sampler is not None) == (tp.rank == 0)
        self.model = model
        self.tp = tp
        self.slots = slots
        self.sampler = sampler
        self.device = device
        self.kv_pool = kv_pool
        self.drafter = drafter
        self.graphs = graphs
        self.compiled = compiled
        self.clock = clock

    def run(self, plan: StepPlan) -> StepResult | None:
        """One step; the result is rank 0's."""
        started = self.clock()
        self._apply(plan)
        drafts = self._drafts(plan)
        batch = build_batch(plan, self.slots, drafts)
        if batch is None:
            return StepResult(plan.step_id, b"") if self.sampler is not None else None
        if self.sampler is not None:
            self.sampler.prepare(batch.slots[batch.sampled])
        rows = LogitRows(batch, self._wants_prompt_logprobs(batch))
        logits = self._logits(batch, rows)
        computed = self.clock()
        result = self._sample(plan.step_id, batch, rows, logits, drafts)
        if result is None:
            return None
        return msgspec.structs.replace(result, forward_s=computed - started, sample_s=self.clock() - computed)

    def _apply(self, plan: StepPlan) -> None:
        if plan.block_imports:
            assert self.kv_pool is not None, "a plan imports KV blocks into a pool that is not shared"
            self.kv_pool.import_blocks(plan.block_imports)
        self.slots.apply_plan(plan)
        if self.sampler is not None:
            for slot in plan.freed_slots:
                self.sampler.free(slot)
            for new in plan.new_slots:
                self.sampler.add(new)
        if plan.block_copies:
            pairs = on(self.device, np.array(plan.block_copies, np.int64))
            for kv_cache in self.model.kv_caches:
                copy_blocks(kv_cache, pairs)

    def _drafts(self, plan: StepPlan) -> Drafts | None:
        """What the decode slots shall verify; the same on every rank, since it follows from the slot table."""
        if plan.num_draft_tokens == 0 or not plan.decode_slots or self.drafter is None:
            return None
        decodes = np.frombuffer(plan.decode_slots, np.int32)
        return list(self.drafter.propose(self.slots, decodes, plan.num_draft_tokens))

    def _wants_prompt_logprobs(self, batch: StepBatch) -> list[int]:
        """The chunks, by place, whose every token's logits are asked for."""
        chunks = batch.slots[: batch.num_chunks].tolist()
        sampling = [self.slots.sampling[slot] for slot in chunks]
        return [
            place for place, params in enumerate(sampling) if params is not None and params.prompt_logprobs is not None
        ]

    def _logits(self, batch: StepBatch, rows: LogitRows) -> Tensor | None:
        """Of `rows`, on rank 0; None elsewhere, and where a step only fills the KV cache."""
        hidden = self._forward(batch, rows)
        if len(hidden) == 0:
            return None
        return self.model.logits(hidden)

    def _forward(self, batch: StepBatch, rows: LogitRows) -> Tensor:
        if batch.num_tokens == len(batch.slots) and batch.num_chunks == 0:
            if self.graphs is not None:
                return self.graphs.run(batch)
            if self.compiled is not None:
                return self.compiled(on(self.device, batch.input_ids), batch.attention(self.device), None)
        tokens = None if rows.are_all else on(self.device, rows.tokens)
        return self.model(on(self.device, batch.input_ids), batch.attention(self.device), tokens)

    def _sample(
        self, step_id: int, batch: StepBatch, rows: LogitRows, logits: Tensor | None, drafts: Drafts | None
    ) -> StepResult | None:
        slots = batch.slots[batch.sampled]
        sampled, prompt_logprobs = None, {}
        if self.sampler is not None and logits is not None:
            prompt_logprobs = self._prompt_logprobs(self.sampler, batch, rows, logits)
            sampled = self._choose(self.sampler, batch, slots, logits[: rows.num_sampled], drafts)
        ids, counts = self._share(sampled, len(slots), rows.num_sampled)
        self._append(slots, ids, counts)
        if self.sampler is None:
            return None
        return StepResult(
            step_id,
            ids.tobytes(),
            num_tokens=b"" if (counts == 1).all() else counts.tobytes(),
            logprobs={} if sampled is None else sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            failed={} if sampled is None else sampled.failed,
            num_drafted=0 if drafts is None else sum(map(len, drafts)),
            num_accepted=int(np.maximum(counts - 1, 0).sum()),
        )

    def _prompt_logprobs(
        self, sampler: Sampler, batch: StepBatch, rows: LogitRows, logits: Tensor
    ) -> dict[int, list[TokenLogprobs | None]]:
        found = {}
        for place, part in rows.prompts:
            slot = int(batch.slots[place])
            found[slot] = sampler.prompt_logprobs(slot, logits[part], int(batch.starts[place]))
        return found

    def _choose(
        self, sampler: Sampler, batch: StepBatch, slots: np.ndarray, logits: Tensor, drafts: Drafts | None
    ) -> Sampled | None:
        if len(slots) == 0:
            return None
        if drafts is None:
            return sampler.sample(logits, slots)
        num_first = len(slots) - len(drafts)  # chunks that end their prompt: nothing to verify
        return sampler.verify(logits, slots, [np.empty(0, np.int32)] * num_first + drafts)

    def _share(self, sampled: Sampled | None, num_slots: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, how many of them for each slot) of rank 0's sampling, on every rank. At most `most` ids."""
        counts = np.ones(num_slots, np.int32)
        if num_slots == 0:
            return np.empty(0, np.int32), counts
        ids = np.zeros(most, np.int32)
        if sampled is not None:
            ids[: len(sampled.token_ids)] = sampled.token_ids
            counts[:] = sampled.num_tokens
        if self.tp.size > 1:
            message = on(self.device, np.concatenate([counts, ids]))
            counts, ids = np.split(self.tp.broadcast(message).cpu().numpy(), [num_slots])
        return ids[: counts.sum()], counts

    def _append(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> None:
        firsts = np.cumsum(counts) - counts
        for nth in range(counts.max(initial=0)):
            longer = counts > nth
            self.slots.append(slots[longer], ids[firsts[longer] + nth])


class LogitRows:
    """The tokens of the flat batch whose logits a step needs: those to sample from, then those of prompt logprobs."""

    def __init__(self, batch: StepBatch, prompt_places: list[int]) -> None:
        ends = batch.query_start[1:]
        chunks = batch.sampled[batch.sampled < batch.num_chunks]
        decodes = np.arange(batch.query_start[batch.num_chunks], batch.num_tokens)  # drafts included
        tokens = [ends[chunks] - 1, decodes]
        self.num_sampled = len(chunks) + len(decodes)
        self.prompts: list[tuple[int, slice]] = []  # place of the request, and its rows
        end = self.num_sampled
        for place in prompt_places:
            own = np.arange(batch.query_start[place], ends[place])
            tokens.append(own)
            self.prompts.append((place, slice(end, end + len(own))))
            end += len(own)
        self.tokens = np.concatenate(tokens).astype(np.int64)
        self.are_all = batch.num_chunks == 0

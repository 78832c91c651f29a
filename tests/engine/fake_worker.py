"""A worker without a model, for tests: it proves that every token reads exactly its own history.

KV content is the hash of all ids up to a position. Before a row computes anything, what its block table shows at every
earlier position must be the hash of its own history; so a block shared wrongly, found too early, copied too late or
reused too soon is caught at the first token that would have read it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from orcaserve.engine.messages import Chunk, GenerateRequest, NewSlot, StepPlan, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.slots import SlotTable

MASK = (1 << 61) - 1


def chain(last: int, token: int) -> int:
    return (last * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


@dataclass
class Model:
    """The next token is a function of the history and the choice: whoever computes it, it comes out the same."""

    vocab_size: int = 50
    eos_token_id: int = 2
    eos_share: float = 0.05

    def next_token(self, history: int, sampling: SamplingParams, choice: int, num_output: int) -> int:
        rng = random.Random(history ^ (sampling.seed * 7919) ^ (choice * 104729))
        banned = {self.eos_token_id, *sampling.stop_token_ids} if num_output < sampling.min_tokens else set()
        if rng.random() < self.eos_share and not banned:
            return self.eos_token_id
        while (token := rng.randrange(3, self.vocab_size)) in banned:
            pass
        return token

    def solo(self, request: GenerateRequest, choice: int, max_model_len: int) -> tuple[list[int], str]:
        """The text and finish reason that a request must have, whatever else happens."""
        sampling = request.sampling
        history = 0
        for token in request.prompt_token_ids:
            history = chain(history, token)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (self.eos_token_id,))}
        out: list[int] = []
        limit = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
        while True:
            token = self.next_token(history, sampling, choice, len(out))
            out.append(token)
            history = chain(history, token)
            if token in stops and len(out) >= sampling.min_tokens:
                return out, "stop"
            if len(out) >= limit:
                return out, "length"


@dataclass
class FakeWorker:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    model: Model = field(default_factory=Model)
    seed: int = 0
    scratch_block: int = -1  # nobody's: rows may write there at will, and what they read there does not matter

    def __post_init__(self) -> None:
        self.contents: dict[tuple[int, int], int] = {}
        self.num_computed_tokens = 0
        self.rng = random.Random(self.seed)
        self.reset()

    def reset(self) -> None:
        """A new scheduler takes it over: the KV stays where it is."""
        self.slots = SlotTable(self.max_num_seqs, self.max_model_len, self.block_size)
        self.live: set[int] = set()
        self.choices: dict[int, NewSlot] = {}
        self.last_step = -1
        self.compiling: set[int] = set()  # slots whose grammar is not there yet
        self.held: dict[int, dict[tuple[int, int], int]] = {}  # what neighbours' pools hold

    def hold(self, group_id: int, neighbour: FakeWorker) -> None:
        """Be able to read its pool from now on, whatever becomes of it."""
        self.held[group_id] = neighbour.contents

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.step_id > self.last_step
        self.last_step = plan.step_id
        self._update_slots(plan)
        decodes = np.frombuffer(plan.decode_slots, np.int32).tolist()
        rows = [(c.slot, c.start, c.num_tokens, c.samples) for c in plan.chunks]
        rows += [(s, int(self.slots.num_tokens[s]) - 1, 1, True) for s in decodes]
        assert len({slot for slot, *_ in rows}) == len(rows), "a slot twice in one step"
        total = sum(n for _, _, n, _ in rows) + plan.num_draft_tokens * len(decodes)
        assert 0 < total <= self.max_num_batched_tokens, f"{total} tokens in a step"
        self.num_computed_tokens += sum(n for _, _, n, _ in rows)
        histories = [self._read(slot, start) for slot, start, _, _ in rows]
        written: set[tuple[int, int]] = set()
        sampled: list[list[int]] = []
        for (slot, start, num, samples), history in zip(rows, histories, strict=True):
            history = self._write(slot, start, num, history, written)
            if samples:
                assert start + num == self.slots.num_tokens[slot], "samples before the last token"
                sampled.append([self._sample(slot, history)] if self._has_compiled(slot) else [])
        first_decode = len(sampled) - len(decodes)
        for i, slot in enumerate(decodes):
            if plan.num_draft_tokens:
                sampled[first_decode + i] += self._speculate(slot, sampled[first_decode + i][0], plan, written)
        sampling_slots = [slot for slot, *_, samples in rows if samples]
        for slot, ids in zip(sampling_slots, sampled, strict=True):
            for token in ids:
                if self.slots.num_tokens[slot] < self.max_model_len + 1:
                    self.slots.append(np.array([slot]), np.array([token]))
        flat = np.array([t for ids in sampled for t in ids], np.int32).tobytes()
        lengths = [len(ids) for ids in sampled]
        counts = np.array(lengths, np.int32).tobytes() if plan.num_draft_tokens or 0 in lengths else b""
        prompt_logprobs = {
            c.slot: [None] * self._num_scored(c)
            for c in plan.chunks
            if self.choices[c.slot].sampling.prompt_logprobs is not None
        }
        return StepResult(plan.step_id, flat, counts, prompt_logprobs=prompt_logprobs)

    def _update_slots(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            assert slot in self.live, f"slot {slot} freed while free"
            self.live.remove(slot)
        for new in plan.new_slots:
            assert new.slot not in self.live, f"slot {new.slot} filled while taken"
            self.live.add(new.slot)
            self.choices[new.slot] = new
            self.compiling.discard(new.slot)
            if new.sampling.grammar is not None:
                self.compiling.add(new.slot)
        for slot in [*(c.slot for c in plan.chunks), *np.frombuffer(plan.decode_slots, np.int32).tolist()]:
            assert slot in self.live, f"slot {slot} runs while free"
        self.slots.apply_plan(plan)
        for group_id, source, target in plan.block_imports:
            for offset in range(self.block_size):
                self.contents.pop((target, offset), None)
                if (source, offset) in self.held[group_id]:
                    self.contents[target, offset] = self.held[group_id][source, offset]
        copies = [
            ((target, offset), self.contents[source, offset])
            for source, target in plan.block_copies
            for offset in range(self.block_size)
            if (source, offset) in self.contents
        ]
        self.contents.update(copies)

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block = position // self.block_size
        assert block < self.slots.num_blocks[slot], f"slot {slot} has no block for position {position}"
        return int(self.slots.block_tables[slot, block]), position % self.block_size

    def _read(self, slot: int, end: int) -> int:
        history = 0
        for position in range(end):
            history = chain(history, int(self.slots.token_ids[slot, position]))
            place = self._place(slot, position)
            found = self.contents.get(place)
            mine = found == history or place[0] == self.scratch_block
            assert mine, f"slot {slot} reads another's KV at position {position}"
        return history

    def _write(self, slot: int, start: int, num: int, history: int, written: set[tuple[int, int]]) -> int:
        for position in range(start, start + num):
            history = chain(history, int(self.slots.token_ids[slot, position]))
            place = self._place(slot, position)
            assert place not in written or place[0] == self.scratch_block, f"two rows write block {place}"
            written.add(place)
            self.contents[place] = history
        return history

    def _sample(self, slot: int, history: int, ahead: int = 0) -> int:
        new = self.choices[slot]
        num_output = int(self.slots.num_tokens[slot] - self.slots.num_prompt_tokens[slot]) + ahead
        return self.model.next_token(history, new.sampling, new.choice_index, num_output)

    def _num_scored(self, chunk: Chunk) -> int:
        """Prompt tokens that the chunk's logits are about, and the first one, which none are about."""
        end = min(chunk.start + chunk.num_tokens + 1, int(self.slots.num_prompt_tokens[chunk.slot]))
        return max(0, end - chunk.start - 1) + (chunk.start == 0)

    def _has_compiled(self, slot: int) -> bool:
        """In each step as likely as not."""
        if slot in self.compiling and self.rng.random() < 0.5:
            self.compiling.remove(slot)
        return slot not in self.compiling

    def _speculate(self, slot: int, first: int, plan: StepPlan, written: set[tuple[int, int]]) -> list[int]:
        """Drafts of a random number of right tokens and then wrong ones, as far as the block table reaches."""
        at = int(self.slots.num_tokens[slot])
        history = self._read(slot, at)
        room = int(self.slots.num_blocks[slot]) * self.block_size - at
        num_drafts = min(plan.num_draft_tokens, room, self.max_model_len - at)
        num_right = self.rng.randint(0, max(0, num_drafts))
        accepted, token = [], first
        for i in range(num_drafts):
            place = self._place(slot, at + i)
            assert place not in written, f"two rows write block {place}"
            written.add(place)
            if i < num_right:
                history = chain(history, token)
                self.contents[place] = history
                token = self._sample(slot, history, i + 1)
                accepted.append(token)
            else:
                self.contents[place] = -1  # a rejected draft's KV
        return accepted

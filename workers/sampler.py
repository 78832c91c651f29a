"""Logits in, tokens out: what every row of a step samples, by the parameters of its slot.

Parameters lie in columns with a row for each slot, written when a slot is taken; a step gathers them. Rows that ask
for edits, logprobs or a grammar are picked out by index, so that the others do not pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import NewSlot, TokenLogprobs
from orcaserve.kernels.sampling import MIN_TEMPERATURE, sample, token_logprobs, uniform
from orcaserve.workers.batch import on
from orcaserve.workers.grammar import GrammarCompiler, GrammarSlots
from orcaserve.workers.penalties import LogitEdits
from orcaserve.workers.slots import SlotTable

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
SEED_BITS = (1 << 64) - 1


@dataclass(slots=True)
class Sampled:
    """What the rows of a step chose, in the order of the rows."""

    token_ids: np.ndarray  # int32; all rows' ids one after the other
    num_tokens: np.ndarray  # int32 [rows]; more than one: accepted speculation; none: a later step is to sample it
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # slot -> one per id, where asked
    failed: dict[int, str] = field(default_factory=dict)  # slot -> reason; its row has one id, which is void
    late: list[int] = field(default_factory=list)  # slots whose grammar is not compiled yet: their rows have no id


class Sampler:
    """Reads history and positions from the slot table, which the caller appends the result to."""

    def __init__(
        self,
        slots: SlotTable,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """vocab_size: ids from there on are padding, which is never sampled. grammars: None refuses them."""
        max_num_seqs = len(slots.num_tokens)
        self.slots = slots
        self.vocab_size = vocab_size
        self.device = device
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.has_grammar = np.zeros(max_num_seqs, bool)
        self.edits = LogitEdits(slots, vocab_size, eos_token_ids, device)
        self.grammars = None if grammars is None else GrammarSlots(slots, grammars)
        self.eos_token_ids = frozenset(eos_token_ids)

    def add(self, new: NewSlot) -> None:
        """A slot is taken. It is in the slot table already."""
        params, slot = new.sampling, new.slot
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = np.uint64(params.seed & SEED_BITS).astype(np.int64)
        self.num_logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self.has_grammar[slot] = params.grammar is not None
        self.edits.add(new)
        if self.grammars is not None:
            self.grammars.add(new)

    def free(self, slot: int) -> None:
        self.edits.free(slot)
        if self.grammars is not None:
            self.grammars.free(slot)

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def prepare(self, slots: np.ndarray) -> None:
        """Call before the forward pass of a step in which these slots sample: grammar masks are filled beside it."""
        if self.grammars is not None:
            self.grammars.prepare(slots)

    def sample(self, logits: Tensor, slots: np.ndarray) -> Sampled:
        """One token for each of these distinct slots from `logits` [rows, vocab], which are changed on the way."""
        result = Sampled(np.zeros(0, np.int32), np.ones(len(slots), np.int32))
        ids = self._choose(self._cut(logits), slots, self.slots.num_tokens[slots], result)
        result.num_tokens[np.isin(slots, result.late)] = 0
        result.token_ids = ids[result.num_tokens > 0]
        return result

    def verify(self, logits: Tensor, slots: np.ndarray, drafts: Sequence[np.ndarray]) -> Sampled:
        """Up to 1 + len(draft) tokens a slot, from as many rows of `logits`: those of a slot lie one after the other.

        Row j of a slot is what the model says after its known tokens and the first j of its draft. A row is sampled
        exactly as plain decoding would; if that gives the draft's next token, the row after it counts too. See
        speculation.py for why this is rejection sampling. The loop is over draft positions, not over slots.
        """
        logits = self._cut(logits)
        num_drafted = np.fromiter((len(draft) for draft in drafts), np.int32, len(drafts))
        first = np.cumsum(num_drafted + 1) - (num_drafted + 1)
        assert len(logits) == len(slots) + num_drafted.sum(), f"{len(logits)} rows for {len(slots)} slots with drafts"
        drafted = np.full((len(slots), int(num_drafted.max(initial=0)) + 1), -1, np.int32)
        for row, draft in enumerate(drafts):
            drafted[row, : len(draft)] = draft
        result = Sampled(np.zeros(0, np.int32), np.zeros(len(slots), np.int32))
        chosen = np.zeros_like(drafted)
        alive = np.arange(len(slots))
        for place in range(drafted.shape[1]):
            # Tokens accepted so far lie behind the slot's known ones: they are history now.
            lengths = self.slots.num_tokens[slots[alive]] + place
            ids = self._choose(self._rows(logits, first[alive] + place), slots[alive], lengths, result)
            chosen[alive, place] = ids
            result.num_tokens[alive] += ~np.isin(slots[alive], result.late)
            going_on = np.flatnonzero(ids == drafted[alive, place])
            going_on = going_on[~self._ends(slots[alive[going_on]], ids[going_on], result)]
            alive = alive[going_on]
            if len(alive) == 0:
                break
            self.slots.token_ids[slots[alive], lengths[going_on]] = ids[going_on]
        result.token_ids = chosen[np.arange(drafted.shape[1]) < result.num_tokens[:, None]]
        return result

    def prompt_logprobs(self, slot: int, logits: Tensor, start: int) -> list[TokenLogprobs | None]:
        """Of the prompt's tokens that `logits` [m, vocab] predict: row j, at position start + j, is about the next one.

        With start 0 the list begins with None for the first token, which nothing predicts; so the lists of a
        prompt's chunks together have one entry for each of its tokens.
        """
        params = self.slots.sampling[slot]
        assert params is not None
        assert params.prompt_logprobs is not None
        num_prompt_tokens = int(self.slots.num_prompt_tokens[slot])
        tokens = self.slots.token_ids[slot, start + 1 : min(start + 1 + len(logits), num_prompt_tokens)]
        num_top = np.full(len(tokens), min(params.prompt_logprobs, self.vocab_size), np.int32)
        first: list[TokenLogprobs | None] = [None] if start == 0 else []
        return first + _entries(self._cut(logits)[: len(tokens)], tokens, num_top)

    def _cut(self, logits: Tensor) -> Tensor:
        return logits[:, : self.vocab_size].float()

    def _rows(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        return logits if len(rows) == len(logits) else logits[on(self.device, rows)]

    def _choose(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray, result: Sampled) -> np.ndarray:
        """One id a row, int32; logprobs and failures go into `result`. Row i has `lengths[i]` known tokens."""
        wanted = np.flatnonzero(self.num_logprobs[slots] >= 0)
        raw = self._raw(logits, slots, wanted)
        self.edits.apply(logits, slots, lengths)
        failed, late = self._apply_grammars(logits, slots, lengths)
        self.edits.delay_end(logits, slots, lengths, self.has_grammar[slots])
        chosen = self._draw(logits, slots, lengths)
        ids = chosen.cpu().numpy().astype(np.int32)
        possible = logits.gather(1, chosen[:, None])[:, 0].isfinite().cpu().numpy()
        for slot in slots[~possible].tolist():
            if slot not in late:
                failed.setdefault(slot, "no token is left to choose from")
        if len(wanted):
            self._report(raw, slots[wanted], ids[wanted], result)
        if failed:
            ids[np.isin(slots, list(failed))] = 0
            result.failed.update(failed)
        result.late += late
        for slot in (*failed, *late):
            result.logprobs.pop(slot, None)
        return ids

    def _raw(self, logits: Tensor, slots: np.ndarray, wanted: np.ndarray) -> Tensor:
        """The logits of the `wanted` rows, as they stay when the rest is edited."""
        if len(wanted) == 0 or not (self.edits.active[slots[wanted]] | self.has_grammar[slots[wanted]]).any():
            return self._rows(logits, wanted)
        return logits[on(self.device, wanted)]

    def _apply_grammars(
        self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray
    ) -> tuple[dict[int, str], list[int]]:
        if self.grammars is not None:
            return self.grammars.apply(logits, slots, lengths)
        return dict.fromkeys(slots[self.has_grammar[slots]].tolist(), "this model has no tokenizer.json"), []

    def _draw(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Tensor:
        temperature = self.temperature[slots]
        if (temperature < MIN_TEMPERATURE).all():
            noise = torch.zeros(len(slots), device=self.device)
        else:
            noise = uniform(
                on(self.device, self.seed[slots]),
                on(self.device, lengths.astype(np.int64)),
                on(self.device, self.slots.choice_index[slots].astype(np.int64)),
            )
        return sample(
            logits,
            on(self.device, temperature),
            on(self.device, self.top_k[slots]),
            on(self.device, self.top_p[slots]),
            on(self.device, self.min_p[slots]),
            noise,
        )

    def _report(self, raw: Tensor, slots: np.ndarray, ids: np.ndarray, result: Sampled) -> None:
        entries = _entries(raw, ids, self.num_logprobs[slots])
        for slot, entry in zip(slots.tolist(), entries, strict=True):
            result.logprobs.setdefault(slot, []).append(entry)

    def _ends(self, slots: np.ndarray, ids: np.ndarray, result: Sampled) -> np.ndarray:
        """Rows after which nothing is to be sampled: the request ends with this token, has failed or has to wait."""
        ends = np.zeros(len(slots), bool)
        for row, (slot, token) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
            params = self.slots.sampling[slot]
            assert params is not None
            is_eos = token in self.eos_token_ids and not params.ignore_eos
            ends[row] = is_eos or token in params.stop_token_ids or slot in result.failed or slot in result.late
        return ends


def _entries(logits: Tensor, token_ids: np.ndarray, num_top: np.ndarray) -> list[TokenLogprobs]:
    """The chosen token's entry and the best `num_top[i]` of each row of raw logits [rows, vocab]."""
    ids = on(logits.device, token_ids.astype(np.int64))
    own, ranks, top_ids, top = token_logprobs(logits, ids, int(num_top.max(initial=0)))
    return [
        TokenLogprobs(token, logprob, rank, list(zip(row_ids[:count], row_logprobs[:count], strict=True)))
        for token, logprob, rank, row_ids, row_logprobs, count in zip(
            token_ids.tolist(),
            _finite(own),
            ranks.tolist(),
            top_ids.tolist(),
            _finite(top),
            num_top.tolist(),
            strict=True,
        )
    ]


def _finite(logprobs: Tensor) -> list:
    return logprobs.nan_to_num(LOWEST_LOGPROB, LOWEST_LOGPROB, LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB).tolist()

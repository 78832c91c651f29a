"""What requests do to their own logits before sampling: penalties, biases, forbidden words and allowed tokens.

The order is: penalties on the tokens seen so far, then `logit_bias`, then what is not allowed at all becomes -inf, and
last, after grammars, the end where it would come too early.
Rows that ask for nothing are not touched and cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import NewSlot
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.batch import on
from orcaserve.workers.slots import SlotTable

NO_IDS = np.zeros(0, np.int64)
NO_BIAS = np.zeros(0, np.float32)


class Words(NamedTuple):
    """Forbidden words of several tokens, as columns."""

    last_ids: np.ndarray  # int64 [words]
    num_before: np.ndarray  # int64 [words]: tokens before the last one, at least one
    before: np.ndarray  # int32: these tokens of all words, one word after the other


NO_WORDS = Words(NO_IDS, NO_IDS, np.zeros(0, np.int32))


class LogitEdits:
    """Columns with a row for each slot, changed when a slot is taken or freed."""

    def __init__(self, slots: SlotTable, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        max_num_seqs = len(slots.num_tokens)
        self.slots = slots
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.active = np.zeros(max_num_seqs, bool)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.min_length = np.zeros(max_num_seqs, np.int32)  # no end before this many tokens are known
        # Output tokens by id, of slots with a presence or frequency penalty. Untouched rows take no memory.
        self.counts = np.zeros((max_num_seqs, vocab_size), np.int32)
        self.num_counted = np.zeros(max_num_seqs, np.int32)
        self.bias_ids: list[np.ndarray] = [NO_IDS] * max_num_seqs
        self.bias: list[np.ndarray] = [NO_BIAS] * max_num_seqs
        self.end_ids: list[np.ndarray] = [NO_IDS] * max_num_seqs
        self.allowed: list[np.ndarray | None] = [None] * max_num_seqs
        self.has_words = np.zeros(max_num_seqs, bool)  # forbidden ones of several tokens
        self.words: list[Words] = [NO_WORDS] * max_num_seqs

    def add(self, new: NewSlot) -> None:
        params, slot = new.sampling, new.slot
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.min_length[slot] = new.num_prompt_tokens + params.min_tokens if params.min_tokens > 0 else 0
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts[slot] = 0
            self.num_counted[slot] = new.num_prompt_tokens
        self.bias_ids[slot], self.bias[slot] = self._bias(params)
        self.end_ids[slot] = self._known(self.eos_token_ids + params.stop_token_ids) if params.min_tokens else NO_IDS
        self.allowed[slot] = self._known(params.allowed_token_ids) if params.allowed_token_ids else None
        self.words[slot] = self._words(params)
        self.has_words[slot] = len(self.words[slot].last_ids) > 0
        self.active[slot] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.min_tokens > 0
            or len(self.bias_ids[slot]) > 0
            or self.allowed[slot] is not None
            or self.has_words[slot]
        )

    def free(self, slot: int) -> None:
        self.active[slot] = False

    def apply(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Change `logits` [rows, vocab] in place. Row i is slot `slots[i]`, of which `lengths[i]` tokens are known."""
        rows = np.flatnonzero(self.active[slots])
        if len(rows) == 0:
            return
        slots, lengths = slots[rows], lengths[rows]
        self._penalize(logits, rows, slots, lengths)
        self._add(logits, rows, [self.bias_ids[slot] for slot in slots], [self.bias[slot] for slot in slots])
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if (allowed := self.allowed[slot]) is not None:
                self._keep_only(logits[row], allowed)
        speaking = self.has_words[slots]
        if speaking.any():
            self._forbid_words(logits, rows[speaking], slots[speaking], lengths[speaking])

    def delay_end(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray, has_grammar: np.ndarray) -> None:
        """Forbid the end to those that have not their min_tokens yet; after `apply`, and after grammars.

        A row whose grammar leaves nothing but the end may end: what it has is all that there can be.
        """
        rows = np.flatnonzero(self.active[slots] & (lengths < self.min_length[slots]))
        if has_grammar[rows].any():
            rows = rows[~has_grammar[rows] | self._can_go_on(logits, rows, slots)]
        ends = [self.end_ids[slot] for slot in slots[rows]]
        self._add(logits, rows, ends, [np.full(len(ids), -np.inf, np.float32) for ids in ends])

    def _can_go_on(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Whether a row has a token to choose that is no end, of each of these rows."""
        possible = logits[on(self.device, rows)].isfinite()
        for place, slot in enumerate(slots[rows].tolist()):
            possible[place, on(self.device, self.end_ids[slot])] = False
        return possible.any(1).cpu().numpy()

    def _bias(self, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """logit_bias and the forbidden words of one token as one list of additions; each id once."""
        bias = {token: value for token, value in params.logit_bias if token < self.vocab_size}
        bias.update({word[0]: -np.inf for word in params.bad_words if len(word) == 1 and word[0] < self.vocab_size})
        return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    def _words(self, params: SamplingParams) -> Words:
        words = [word for word in params.bad_words if len(word) > 1 and word[-1] < self.vocab_size]
        if not words:
            return NO_WORDS
        return Words(
            np.array([word[-1] for word in words], np.int64),
            np.array([len(word) - 1 for word in words], np.int64),
            np.array([token for word in words for token in word[:-1]], np.int32),
        )

    def _known(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return np.array(sorted({token for token in token_ids if token < self.vocab_size}), np.int64)

    def _penalize(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Repetition looks at prompt and output, presence and frequency at the output alone.

        A token that occurs several times is computed several times from the same old value to the same new one.
        """
        counting = (self.presence[slots] != 0.0) | (self.frequency[slots] != 0.0)
        self._count(slots[counting], lengths[counting])
        repeating = self.repetition[slots] != 1.0
        begins = np.where(repeating, 0, np.where(counting, self.slots.num_prompt_tokens[slots], lengths))
        places, positions = spans(begins, lengths)
        if len(places) == 0:
            return
        token_slots = slots[places]
        tokens = self.slots.token_ids[token_slots, positions].astype(np.int64)
        counts = self.counts[token_slots, tokens]
        counts *= counting[places]  # the row of a slot that does not count holds an earlier slot's numbers
        minus = self.frequency[token_slots] * counts + self.presence[token_slots] * (counts > 0)
        at = (on(self.device, rows[places]), on(self.device, tokens))
        values = logits[at]
        factor = on(self.device, self.repetition[token_slots])
        values = torch.where(values > 0, values / factor, values * factor) - on(self.device, minus.astype(np.float32))
        logits[at] = values

    def _count(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        places, positions = spans(self.num_counted[slots], lengths)
        token_slots = slots[places]
        np.add.at(self.counts, (token_slots, self.slots.token_ids[token_slots, positions]), 1)
        self.num_counted[slots] = lengths

    def _add(self, logits: Tensor, rows: np.ndarray, ids: list[np.ndarray], values: list[np.ndarray]) -> None:
        counts = np.fromiter((len(each) for each in ids), np.int64, len(ids))
        if counts.any():
            at = (on(self.device, np.repeat(rows, counts)), on(self.device, np.concatenate(ids)))
            logits[at] += on(self.device, np.concatenate(values))

    def _forbid_words(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """All words of all rows side by side: does the text of a word's row end with what begins the word?"""
        words = [self.words[slot] for slot in slots]
        last_ids, num_before, before = (np.concatenate(column) for column in zip(*words, strict=True))
        owners = np.repeat(np.arange(len(slots)), [len(each.last_ids) for each in words])
        ends = lengths[owners].astype(np.int64)
        places, positions = spans(ends - num_before, ends)
        same = self.slots.token_ids[slots[owners[places]], np.maximum(positions, 0)] == before
        same &= positions >= 0  # else the text is shorter than the beginning of the word
        begun = np.logical_and.reduceat(same, np.cumsum(num_before) - num_before)
        at = (on(self.device, rows[owners[begun]]), on(self.device, last_ids[begun]))
        logits[at] = -torch.inf

    def _keep_only(self, row: Tensor, allowed: np.ndarray) -> None:
        ids = on(self.device, allowed)
        kept = row[ids]
        row.fill_(-torch.inf)
        row[ids] = kept


def spans(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All positions of the ranges [begins[i], ends[i]): which range, and the position, one after the other."""
    counts = ends - begins
    places = np.repeat(np.arange(len(counts)), counts)
    return places, np.arange(len(places)) - (np.cumsum(counts) - counts - begins)[places]

"""Proposers of tokens that a decode step verifies beside its own: the same step then yields several.

Verification (`Sampler.verify`) needs no draft probabilities. At each position it takes the very token that the
position's own noise picks without speculation, and goes on as long as that token is the proposed one. For proposals
that are single tokens this *is* the rejection sampling of Leviathan, Kalman and Matias (Fast inference from
transformers via speculative decoding, ICML 2023, section 2.3): with the draft a point mass on x, q(x) = 1, so x is
accepted with probability min(1, p(x) / q(x)) = p(x), which is how often a draw from p is x; and given a rejection the
token follows p without x, renormalised, which is their residual distribution norm(max(0, p - q)). One draw does both,
and as it is the draw of plain decoding, text is the same with speculation and without, sampled or greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from orcaserve.workers.slots import SlotTable

NOTHING = np.zeros(0, np.int32)


class Drafter(Protocol):
    """A source of proposals. Every rank asks its own, so that they must follow from the slot table (and, for a draft
    model, from weights that all ranks hold) alone."""

    def propose(self, slots: SlotTable, rows: np.ndarray, max_tokens: int) -> Sequence[np.ndarray]:
        """For each of these slots up to `max_tokens` ids (int32) that may follow its newest token."""
        ...


class PromptLookup:
    """Proposes what followed the same n-gram earlier in the request: prompt-lookup decoding.

    The longest n-gram wins, and of its earlier places the latest. Where the text ends before the proposal is long
    enough, it is taken to go round: after "a a a" comes "a a a". Costs a few microseconds a slot: the compared window
    is the last `window` tokens.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, window: int = 4096) -> None:
        assert 1 <= min_ngram <= max_ngram < window
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.window = window

    def propose(self, slots: SlotTable, rows: np.ndarray, max_tokens: int) -> list[np.ndarray]:
        limits = np.minimum(max_tokens, most_accepted(slots, rows))
        return [
            self.continuation(slots.token_ids[slot, max(0, length - self.window) : length], limit)
            for slot, length, limit in zip(rows.tolist(), slots.num_tokens[rows].tolist(), limits.tolist(), strict=True)
        ]

    def continuation(self, history: np.ndarray, limit: int) -> np.ndarray:
        """`limit` ids that followed the last tokens of `history` when they occurred before; none if they did not."""
        if limit <= 0 or len(history) <= self.min_ngram:
            return NOTHING
        # Ends of earlier n-grams: shrink the places where the last token occurs by one more token at a time.
        ends = np.flatnonzero(history[:-1] == history[-1])
        best = ends[:0]
        for length in range(1, self.max_ngram + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[history[ends - length + 1] == history[-length]]
            if len(ends) == 0:
                break
            if length >= self.min_ngram:
                best = ends
        if len(best) == 0:
            return NOTHING
        return np.resize(history[int(best[-1]) + 1 :], limit)  # repeats what is too short


def most_accepted(slots: SlotTable, rows: np.ndarray) -> np.ndarray:
    """How many proposals could at most be emitted for each slot: one more token than these is sampled anyway."""
    max_tokens = np.array([params.max_tokens if (params := slots.sampling[slot]) else 0 for slot in rows.tolist()])
    num_output = slots.num_tokens[rows] - slots.num_prompt_tokens[rows]
    # Proposals need a place in the slot's row of ids, and in a KV block.
    room = np.minimum(slots.token_ids.shape[1] - 1, slots.num_blocks[rows] * slots.block_size) - slots.num_tokens[rows]
    return np.maximum(np.minimum(max_tokens - num_output - 1, room), 0)

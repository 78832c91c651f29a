"""Speculation: the proposer finds repeats, and verification changes neither text nor distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orcaserve.engine.messages import NewSlot, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.sampler import Sampler
from orcaserve.workers.slots import SlotTable
from orcaserve.workers.speculation import PromptLookup

VOCAB = 24
EOS = (2,)
NOTHING = np.zeros(0, np.int32)


def table(prompt: list[int], output: list[int] | None = None, num_slots: int = 1, **params: Any) -> SlotTable:
    slots = SlotTable(num_slots, max_model_len=256, block_size=16)
    sampling = SamplingParams(**{"max_tokens": 100, "seed": 3, **params})
    ids = np.array(prompt + (output or []), np.int32).tobytes()
    taken = [NewSlot(slot, ids, len(prompt), sampling, slot) for slot in range(num_slots)]
    blocks = np.repeat(np.arange(num_slots, dtype=np.int32), 16)
    slots.apply_plan(
        StepPlan(0, [], taken, blocks.tobytes(), np.arange(16 * num_slots, dtype=np.int32).tobytes(), [], [], b"")
    )
    return slots


def sampler_of(slots: SlotTable) -> Sampler:
    sampler = Sampler(slots, VOCAB, EOS, torch.device("cpu"))
    for slot, params in enumerate(slots.sampling):
        assert params is not None
        ids = slots.token_ids[slot, : slots.num_tokens[slot]].tobytes()
        sampler.add(NewSlot(slot, ids, int(slots.num_prompt_tokens[slot]), params, slot))
    return sampler


class TestPromptLookup:
    def proposed(self, history: list[int], max_tokens: int = 3) -> list[int]:
        return PromptLookup().propose(table(history), np.array([0], np.int32), max_tokens)[0].tolist()

    def test_what_followed_the_same_words(self) -> None:
        assert self.proposed([5, 6, 7, 8, 9, 5, 6]) == [7, 8, 9]

    def test_a_longer_match_beats_a_later_one(self) -> None:
        assert self.proposed([4, 5, 6, 7, 0, 9, 5, 6, 8, 0, 4, 5, 6]) == [7, 0, 9]

    def test_of_equal_matches_the_latest(self) -> None:
        assert self.proposed([5, 6, 7, 0, 5, 6, 8, 0, 5, 6], 1) == [8]

    def test_one_word_alone_is_no_match(self) -> None:
        assert self.proposed([5, 6, 7, 8, 9, 5]) == []

    def test_a_loop_is_followed(self) -> None:
        assert self.proposed([1, 5, 6, 5, 6, 5, 6], 2) == [5, 6]

    def test_a_loop_goes_on_for_as_long_as_is_asked(self) -> None:
        assert self.proposed([5, 5, 5, 5], 6) == [5] * 6
        assert self.proposed([5, 5, 5], 2) == [5, 5]
        assert self.proposed([1, 5, 6, 7, 5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7]

    @pytest.mark.parametrize(("max_tokens", "expected"), [(1, 0), (2, 1), (3, 2), (50, 4)])
    def test_the_last_token_is_left_to_sampling(self, max_tokens: int, expected: int) -> None:
        slots = table([5, 6, 7, 8, 9, 5, 6], max_tokens=max_tokens)
        assert len(PromptLookup().propose(slots, np.array([0], np.int32), 4)[0]) == expected

    def test_only_where_a_block_is_there(self) -> None:
        slots = table([5, 6, 7, 8] * 4)
        slots.num_blocks[0] = 1
        assert len(PromptLookup().propose(slots, np.array([0], np.int32), 4)[0]) == 0

    @settings(max_examples=60)
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
    def test_agrees_with_a_plain_search(self, history: list[int], limit: int) -> None:
        expected: list[int] = []
        for length in (4, 3, 2):
            ends = [i for i in range(length, len(history)) if history[i - length : i] == history[-length:]]
            if ends:
                expected = (history[ends[-1] :] * limit)[:limit]
                break
        assert PromptLookup().continuation(np.array(history, np.int32), limit).tolist() == expected


class MarkovModel:
    """Logits that depend on the last two tokens, peaked so that loops and accepted drafts are frequent."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 3

    def logits(self, slots: SlotTable, slot: int, draft: np.ndarray) -> Tensor:
        known = slots.num_tokens[slot]
        history = np.concatenate([slots.token_ids[slot, :known], draft]).astype(np.int64)
        last = torch.from_numpy(history[known - 1 :])
        return self.table[torch.from_numpy(history[known - 2 : -1]), last].clone()


def run(slots: SlotTable, num_tokens: int, draft_tokens: int, seed: int = 0) -> tuple[list[list[int]], int, list[list]]:
    """Texts, accepted draft tokens and logprobs of all slots, each at least `num_tokens` long and then cut."""
    model, sampler, drafter = MarkovModel(seed), sampler_of(slots), PromptLookup()
    rows = np.arange(len(slots.num_tokens), dtype=np.int32)
    first = slots.num_tokens.copy()
    accepted, logprobs = 0, [[] for _ in rows]
    while (slots.num_tokens - first < num_tokens).any():
        drafts = drafter.propose(slots, rows, draft_tokens) if draft_tokens else [NOTHING] * len(rows)
        logits = torch.cat([model.logits(slots, slot, draft) for slot, draft in zip(rows, drafts, strict=True)])
        sampled = sampler.verify(logits, rows, drafts) if draft_tokens else sampler.sample(logits, rows)
        assert sampled.failed == {}
        assert sampled.num_tokens.sum() == len(sampled.token_ids)
        accepted += int((sampled.num_tokens - 1).sum())
        ends = np.cumsum(sampled.num_tokens)
        for slot, end, count in zip(rows.tolist(), ends.tolist(), sampled.num_tokens.tolist(), strict=True):
            for token in sampled.token_ids[end - count : end]:
                slots.append(np.array([slot]), np.array([token]))
            logprobs[slot] += sampled.logprobs.get(slot, [])
    texts = [slots.token_ids[slot, first[slot] : first[slot] + num_tokens].tolist() for slot in rows]
    return texts, accepted, [entries[:num_tokens] for entries in logprobs]


class TestVerification:
    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"temperature": 0.7},
            {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
            {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
            {"temperature": 0.0, "bad_words": ((6, 7), (5,), (6, 9, 11), (13, 13), (20, 4))},
            {"temperature": 0.8, "presence_penalty": 0.3, "min_tokens": 30, "logit_bias": ((2, 3.0),)},
        ],
    )
    @pytest.mark.parametrize("draft_tokens", [1, 4])
    def test_text_is_that_of_plain_decoding(self, params: dict[str, Any], draft_tokens: int) -> None:
        prompt = [5, 6, 7, 5, 6]
        plain = run(table(prompt, num_slots=4, ignore_eos=True, **params), 40, 0)
        fast = run(table(prompt, num_slots=4, ignore_eos=True, **params), 40, draft_tokens)
        assert fast[0] == plain[0]
        assert fast[2] == plain[2]

    def test_drafts_are_accepted(self) -> None:
        _, accepted, _ = run(table([5, 6, 7, 5, 6], num_slots=4, temperature=0.0, ignore_eos=True), 40, 4)
        assert accepted > 40

    def test_nothing_after_the_end(self) -> None:
        """The draft goes on after the stop token; the model agrees with all of it."""
        for params in ({}, {"stop_token_ids": (9,), "ignore_eos": True}):
            slots = table([5, 6], temperature=0.0, **params)
            end = 9 if params else 2
            draft = np.array([7, end, 8, 8], np.int32)
            logits = torch.zeros(5, VOCAB)
            logits[torch.arange(5), torch.tensor([7, end, 8, 8, 8])] = 9.0
            sampled = sampler_of(slots).verify(logits, np.array([0]), [draft])
            assert sampled.token_ids.tolist() == [7, end]

    def test_slots_without_a_draft_beside_others(self) -> None:
        slots = table([5, 6], num_slots=3, temperature=0.0)
        logits = torch.zeros(5, VOCAB)
        logits[torch.arange(5), torch.tensor([4, 7, 8, 9, 10])] = 9.0
        drafts = [NOTHING, np.array([7, 1], np.int32), NOTHING]
        sampled = sampler_of(slots).verify(logits, np.array([0, 1, 2]), drafts)
        assert sampled.num_tokens.tolist() == [1, 2, 1]
        assert sampled.token_ids.tolist() == [4, 7, 8, 10]

    def test_a_failure_fails_its_slot_alone(self) -> None:
        slots = table([5, 6], num_slots=2, temperature=0.0)
        logits = torch.zeros(4, VOCAB)
        logits[torch.arange(4), torch.tensor([7, 8, 9, 4])] = 9.0
        logits[1] = math.nan
        sampled = sampler_of(slots).verify(logits, np.array([0, 1]), [np.array([7, 0], np.int32), NOTHING])
        assert set(sampled.failed) == {0}
        assert sampled.token_ids[-1] == 4

    def test_sampled_pairs_follow_the_target(self) -> None:
        """Chi-square of the first two tokens over many seeds, against the product of the model's own probabilities.

        The draft proposes the most likely pair, so that some pairs come from acceptance and some from rejection.
        """
        num_slots, vocab_size = 20_000, 5
        generator = torch.Generator().manual_seed(11)
        first, second = (
            torch.randn(vocab_size, generator=generator),
            torch.randn(vocab_size, vocab_size, generator=generator),
        )
        slots = SlotTable(num_slots, max_model_len=8, block_size=4)
        sampler = Sampler(slots, vocab_size, (), torch.device("cpu"))
        new = [
            NewSlot(
                slot, np.array([1], np.int32).tobytes(), 1, SamplingParams(max_tokens=4, seed=slot, ignore_eos=True)
            )
            for slot in range(num_slots)
        ]
        slots.apply_plan(StepPlan(0, [], new, b"", b"", [], [], b""))
        for each in new:
            sampler.add(each)
        guess = int(first.argmax())
        rows = np.arange(num_slots)
        drafts = [np.array([guess], np.int32)] * num_slots
        logits = torch.stack([first, second[guess]]).repeat(num_slots, 1)
        sampled = sampler.verify(logits, rows, drafts)
        starts = np.cumsum(sampled.num_tokens) - sampled.num_tokens
        firsts = sampled.token_ids[starts]
        assert ((sampled.num_tokens == 2) == (firsts == guess)).all()
        # Rejected slots draw their second token in a step of their own.
        slots.append(rows, firsts)
        rejected = rows[sampled.num_tokens == 1]
        seconds = np.zeros(num_slots, np.int64)
        seconds[sampled.num_tokens == 2] = sampled.token_ids[(starts + 1)[sampled.num_tokens == 2]]
        seconds[rejected] = sampler.sample(
            second[torch.from_numpy(firsts[rejected].astype(np.int64))], rejected
        ).token_ids
        counts = np.bincount(firsts * vocab_size + seconds, minlength=vocab_size**2)
        expected = (first.softmax(0)[:, None] * second.softmax(1)).flatten().double().numpy() * num_slots
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        freedom = vocab_size**2 - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)
        acceptance = float((sampled.num_tokens == 2).mean())
        assert acceptance == pytest.approx(float(first.softmax(0)[guess]), abs=0.015)

"""The sampler's laws: a row is its own, noise is (seed, position, choice), edits are transformers', nothing is NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from orcaserve.engine.messages import NewSlot, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.sampler import LOWEST_LOGPROB, Sampler
from orcaserve.workers.slots import SlotTable

VOCAB = 97
EOS = (2, 3)
CPU = torch.device("cpu")


class Bench:
    """A slot table and a sampler, with requests put into slots by hand."""

    def __init__(self, max_num_seqs: int = 8, vocab_size: int = VOCAB) -> None:
        self.slots = SlotTable(max_num_seqs, max_model_len=128, block_size=16)
        self.sampler = Sampler(self.slots, vocab_size, EOS, CPU)

    def take(
        self, slot: int, prompt: list[int], output: list[int] | None = None, choice_index: int = 0, **params: Any
    ) -> None:
        sampling = SamplingParams(**{"max_tokens": 64, "seed": 1, **params})
        ids = np.array(prompt + (output or []), np.int32)
        new = NewSlot(slot, ids.tobytes(), len(prompt), sampling, choice_index)
        self.slots.apply_plan(StepPlan(0, [slot], [new], b"", b"", [], [], b""))
        self.sampler.free(slot)
        self.sampler.add(new)

    def edited(self, logits: Tensor, *slots: int) -> Tensor:
        rows = np.array(slots, np.int32)
        changed, lengths = logits.clone(), self.slots.num_tokens[rows]
        self.sampler.edits.apply(changed, rows, lengths)
        self.sampler.edits.delay_end(changed, rows, lengths, self.sampler.has_grammar[rows])
        return changed

    def sample(self, logits: Tensor, *slots: int) -> list[int]:
        rows = np.array(slots, np.int32)
        sampled = self.sampler.sample(logits.clone(), rows)
        assert sampled.failed == {}
        self.slots.append(rows, sampled.token_ids)
        return sampled.token_ids.tolist()


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


class FakeModel:
    """Logits that depend on a request's whole history, as a model's do."""

    def logits(self, history: np.ndarray) -> Tensor:
        seed = int(sum((place + 1) * int(token) for place, token in enumerate(history)))
        return random_logits(1, seed)

    def of(self, slots: SlotTable, *rows: int) -> Tensor:
        return torch.cat([self.logits(slots.token_ids[row, : slots.num_tokens[row]]) for row in rows])


@st.composite
def sampling_params(draw: st.DrawFn) -> dict[str, Any]:
    ids = st.lists(st.integers(0, VOCAB - 1), max_size=5, unique=True).map(tuple)
    word = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple)
    return {
        "seed": draw(st.integers(-(2**63), 2**64 - 1)),
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "top_k": draw(st.sampled_from([0, 1, 5, 10**6])),
        "top_p": draw(st.sampled_from([1.0, 0.8, 1e-9])),
        "min_p": draw(st.sampled_from([0.0, 0.1])),
        "min_tokens": draw(st.sampled_from([0, 3])),
        "stop_token_ids": draw(ids),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -0.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.3])),
        "logit_bias": tuple((token, 2.5) for token in draw(ids)),
        "bad_words": tuple(draw(st.lists(word, max_size=4))),
        "logprobs": draw(st.sampled_from([None, 0, 3])),
    }


class TestARowIsItsOwn:
    @settings(max_examples=25)
    @given(st.lists(sampling_params(), min_size=2, max_size=6), st.integers(0, 1000))
    def test_alone_or_among_others(self, all_params: list[dict[str, Any]], seed: int) -> None:
        """Six steps: tokens and logprobs are bit for bit those of the request alone, in another slot."""
        together, model = Bench(), FakeModel()
        for slot, params in enumerate(all_params):
            together.take(slot, [seed % VOCAB, 5 + slot, 6, 5 + slot], **params)
        rows = np.arange(len(all_params), dtype=np.int32)
        logprobs: list[dict] = []
        for _ in range(6):
            sampled = together.sampler.sample(model.of(together.slots, *rows.tolist()), rows)
            together.slots.append(rows, sampled.token_ids)
            logprobs.append(sampled.logprobs)
        for slot, params in enumerate(all_params):
            alone = Bench()
            alone.take(7, [seed % VOCAB, 5 + slot, 6, 5 + slot], **params)
            for step in range(6):
                sampled = alone.sampler.sample(model.of(alone.slots, 7), np.array([7], np.int32))
                alone.slots.append(np.array([7]), sampled.token_ids)
                assert sampled.logprobs.get(7) == logprobs[step].get(slot)
            assert alone.slots.token_ids[7, :10].tolist() == together.slots.token_ids[slot, :10].tolist()

    @settings(max_examples=25)
    @given(sampling_params(), st.integers(1, 5))
    def test_resumed_from_its_ids(self, params: dict[str, Any], cut: int) -> None:
        """Preempted after `cut` tokens and put into another slot, which another request had used."""
        whole, model = Bench(), FakeModel()
        whole.take(0, [9, 8, 9], choice_index=4, **params)
        expected = [whole.sample(model.of(whole.slots, 0), 0)[0] for _ in range(6)]
        parts = Bench()
        parts.take(1, [5, 5], presence_penalty=1.0, frequency_penalty=1.0, logit_bias=((7, 50.0),), min_tokens=9)
        parts.sample(model.of(parts.slots, 1), 1)
        parts.take(1, [9, 8, 9], output=expected[:cut], choice_index=4, **params)
        assert [parts.sample(model.of(parts.slots, 1), 1)[0] for _ in range(6 - cut)] == expected[cut:]

    def test_choices_of_one_seed_differ_and_reproduce(self) -> None:
        logits = torch.zeros(4, VOCAB)

        def texts() -> list[list[int]]:
            bench = Bench()
            for slot in range(4):
                bench.take(slot, [5, 6], choice_index=slot, seed=42)
            steps = [bench.sample(logits, 0, 1, 2, 3) for _ in range(8)]
            return [list(text) for text in zip(*steps, strict=True)]

        first = texts()
        assert len({tuple(text) for text in first}) == 4
        assert texts() == first


class TestEdits:
    """Each edit alone is what transformers does to the same scores."""

    def test_rows_that_ask_for_nothing_are_not_touched(self) -> None:
        bench = Bench()
        bench.take(0, [5, 6])
        bench.take(1, [5, 6], repetition_penalty=2.0)
        logits = random_logits(2)
        assert torch.equal(bench.edited(logits, 0, 1)[0], logits[0])
        assert not torch.equal(bench.edited(logits, 0, 1)[1], logits[1])

    @pytest.mark.parametrize("penalty", [1.5, 0.6])
    def test_repetition_penalty_sees_prompt_and_output(self, penalty: float) -> None:
        bench = Bench()
        bench.take(0, [5, 6, 6, 7], output=[8, 8], repetition_penalty=penalty)
        logits = random_logits(1)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[5, 6, 6, 7, 8, 8]]), logits)
        assert torch.equal(bench.edited(logits, 0), expected)

    def test_presence_and_frequency_see_the_output_alone(self) -> None:
        bench = Bench()
        bench.take(0, [5, 6, 6], output=[6, 8, 8, 8], presence_penalty=0.5, frequency_penalty=0.25)
        logits = random_logits(1)
        expected = logits.clone()
        expected[0, 6] -= 0.5 + 0.25
        expected[0, 8] -= 0.5 + 0.75
        assert torch.allclose(bench.edited(logits, 0), expected)

    def test_counts_follow_the_tokens_and_forget_with_the_slot(self) -> None:
        bench = Bench()
        bench.take(0, [5], frequency_penalty=1.0)
        logits = torch.zeros(1, VOCAB)
        for _ in range(3):
            bench.edited(logits, 0)
            bench.slots.append(np.array([0]), np.array([9]))
        assert bench.edited(logits, 0)[0, 9] == -3.0
        assert bench.edited(logits, 0)[0, 9] == -3.0
        bench.take(0, [9], frequency_penalty=1.0)
        assert torch.equal(bench.edited(logits, 0), logits)
        bench.take(0, [9], output=[4], repetition_penalty=2.0)
        assert torch.equal(bench.edited(torch.ones(1, VOCAB), 0)[0, [4, 9]], torch.tensor([0.5, 0.5]))

    def test_logit_bias(self) -> None:
        bench = Bench()
        bench.take(0, [5], logit_bias=((7, 3.0), (8, -2.0), (VOCAB + 5, 1.0)))
        logits = random_logits(1)
        expected = SequenceBiasLogitsProcessor({(7,): 3.0, (8,): -2.0})(torch.tensor([[5]]), logits.clone())
        assert torch.equal(bench.edited(logits, 0), expected)

    def test_bad_words_of_one_token(self) -> None:
        bench = Bench()
        bench.take(0, [5], bad_words=((7,), (90,), (VOCAB + 5,)), logit_bias=((7, 100.0),))
        logits = random_logits(1)
        expected = NoBadWordsLogitsProcessor([[7], [90]])(torch.tensor([[5]]), logits.clone())
        assert torch.equal(bench.edited(logits, 0), expected)

    @settings(max_examples=60)
    @given(
        st.lists(st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=4), max_size=6), min_size=1, max_size=5),
        st.lists(st.integers(5, 7), min_size=1, max_size=6),
        st.integers(0, 6),
    )
    def test_bad_words_of_several_tokens(self, words: list[list[list[int]]], text: list[int], num_output: int) -> None:
        """Words of few different tokens, so that texts end with beginnings of words; each row has its own."""
        bench, logits = Bench(), random_logits(len(words))
        split = max(1, len(text) - num_output)
        for slot, mine in enumerate(words):
            bench.take(slot, text[:split], output=text[split:], bad_words=tuple(map(tuple, mine)))
        edited = bench.edited(logits, *range(len(words)))
        for slot, mine in enumerate(words):
            expected = logits[slot : slot + 1].clone()
            if mine:
                expected = NoBadWordsLogitsProcessor(mine)(torch.tensor([text]), expected)
            assert torch.equal(edited[slot : slot + 1], expected)

    def test_a_bad_word_longer_than_any_text(self) -> None:
        bench = Bench()
        bench.take(0, [5] * 8, bad_words=((5,) * 1000, (6, 7)))
        logits = random_logits(1)
        assert torch.equal(bench.edited(logits, 0), logits)

    def test_rows_without_bad_words_are_not_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench()
        bench.take(0, [5], bad_words=((5, 7),))
        bench.take(0, [5], repetition_penalty=2.0)
        bench.take(1, [5], bad_words=((7,),))
        monkeypatch.setattr(bench.sampler.edits, "_forbid_words", None)
        bench.edited(random_logits(2), 0, 1)

    def test_allowed_tokens(self) -> None:
        bench = Bench()
        bench.take(0, [5], allowed_token_ids=(7, 90), temperature=2.0)
        assert {bench.sample(random_logits(1, step), 0)[0] for step in range(60)} == {7, 90}

    @pytest.mark.parametrize("num_output", [0, 2, 3])
    def test_no_end_before_min_tokens(self, num_output: int) -> None:
        bench = Bench()
        bench.take(0, [5], output=[6] * num_output, min_tokens=3, stop_token_ids=(11,))
        logits = random_logits(1)
        processor = MinLengthLogitsProcessor(1 + 3, [*EOS, 11])
        assert torch.equal(bench.edited(logits, 0), processor(torch.tensor([[5] + [6] * num_output]), logits.clone()))

    def test_a_row_with_nothing_left_fails_alone(self) -> None:
        bench = Bench()
        bench.take(0, [5], temperature=0.0)
        bench.take(1, [5], allowed_token_ids=(2,), min_tokens=1, logprobs=1)
        logits = random_logits(2)
        sampled = bench.sampler.sample(logits.clone(), np.array([0, 1], np.int32))
        assert set(sampled.failed) == {1}
        assert 1 not in sampled.logprobs
        assert sampled.token_ids[0] == logits[0].argmax()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_model_that_yields_nonsense_fails_that_row_alone(self, bad: float) -> None:
        bench = Bench()
        for slot in range(3):
            bench.take(slot, [5, slot], logprobs=2)
        logits = random_logits(3)
        alone = [bench.sampler.sample(logits[row : row + 1].clone(), np.array([row])).token_ids[0] for row in (0, 2)]
        logits[1, 50] = bad
        sampled = bench.sampler.sample(logits.clone(), np.arange(3))
        assert set(sampled.failed) == {1}
        assert sampled.token_ids[[0, 2]].tolist() == alone

    def test_padding_of_the_vocabulary_is_never_sampled(self) -> None:
        bench = Bench(vocab_size=50)
        bench.take(0, [5], logprobs=5)
        logits = random_logits(1)
        logits[:, 50:] = 100.0
        for _ in range(20):
            sampled = bench.sampler.sample(logits.clone(), np.array([0]))
            assert sampled.token_ids[0] < 50
            assert all(token < 50 for token, _ in sampled.logprobs[0][0].top)


class TestLogprobs:
    def test_are_of_the_raw_distribution(self) -> None:
        bench = Bench()
        bench.take(0, [5], temperature=0.0, logprobs=4, logit_bias=((7, 100.0),))
        logits = random_logits(1)
        sampled = bench.sampler.sample(logits.clone(), np.array([0]))
        expected = logits[0].log_softmax(-1)
        entry = sampled.logprobs[0][0]
        assert entry.token_id == sampled.token_ids[0] == 7
        assert entry.logprob == pytest.approx(float(expected[7]), abs=1e-6)
        assert entry.rank == int((expected > expected[7]).sum()) + 1
        values, ids = expected.topk(4)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-6)

    def test_rows_have_as_many_as_they_asked_for(self) -> None:
        bench = Bench()
        for slot, count in enumerate((None, 0, 2, 10**6)):
            bench.take(slot, [5], logprobs=count)
        sampled = bench.sampler.sample(random_logits(4), np.arange(4))
        assert {slot: len(entries[0].top) for slot, entries in sampled.logprobs.items()} == {1: 0, 2: 2, 3: VOCAB}

    def test_infinities_are_clamped(self) -> None:
        bench = Bench()
        bench.take(0, [5], logprobs=VOCAB)
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[0, 4] = 1.0
        entry = bench.sampler.sample(logits, np.array([0])).logprobs[0][0]
        assert entry.logprob == 0.0
        assert {value for _, value in entry.top[1:]} == {LOWEST_LOGPROB}

    @pytest.mark.parametrize("cuts", [(40,), (1, 39), (7, 20, 13)])
    def test_of_the_prompt_whole_or_in_chunks(self, cuts: tuple[int, ...]) -> None:
        bench = Bench()
        prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
        bench.take(0, prompt, prompt_logprobs=2)
        logits = random_logits(40)
        entries: list = []
        start = 0
        for size in cuts:
            entries += bench.sampler.prompt_logprobs(0, logits[start : start + size], start)
            start += size
        assert entries[0] is None
        expected = logits.log_softmax(-1)
        assert [entry.token_id for entry in entries[1:]] == prompt[1:]
        for place, entry in enumerate(entries[1:]):
            assert entry.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=1e-6)
            assert [token for token, _ in entry.top] == expected[place].topk(2).indices.tolist()


class TestTinySettings:
    @settings(max_examples=30)
    @given(
        st.sampled_from([{"temperature": 1e-9}, {"top_p": 1e-9}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.5}]),
        st.integers(0, 1000),
    )
    def test_are_greedy(self, params: dict[str, float], seed: int) -> None:
        bench = Bench()
        bench.take(0, [5], **params)
        bench.take(1, [5], seed=seed)
        logits = random_logits(2, seed)
        assert bench.sample(logits, 0, 1)[0] == int(logits[0].argmax())

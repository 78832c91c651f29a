"""Sampling against its reference, against transformers, and against the distribution that it claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from orcaserve.kernels.sampling import (
    sample,
    sample_reference,
    token_logprobs,
    token_logprobs_reference,
    uniform,
    uniform_reference,
)

SEEDS = st.integers(-(2**63), 2**63 - 1)
COUNTERS = st.integers(0, 2**31)
Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def parameters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, noise=None) -> Parameters:
    if noise is None:
        noise = uniform(torch.full((rows,), 7), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    return (
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), float(top_p)),
        torch.full((rows,), float(min_p)),
        noise,
    )


def of_row(values: Parameters, row: int) -> Parameters:
    temperature, top_k, top_p, min_p, noise = values
    cut = slice(row, row + 1)
    return temperature[cut], top_k[cut], top_p[cut], min_p[cut], noise[cut]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Parameters]:
    """Rows of every kind side by side; every third has a logit grid so coarse that there are many ties."""
    rows = draw(st.integers(1, 9))
    vocab_size = draw(st.sampled_from([1, 2, 7, 63, 64, 1023, 1025, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(rows, vocab_size, generator=generator) * draw(st.sampled_from([0.01, 1.0, 4.0, 30.0]))
    grid = draw(st.sampled_from([0.0, 0.0, 0.5]))
    if grid:
        logits = (logits / grid).round() * grid
    if draw(st.booleans()) and vocab_size > 2:
        logits[:, : vocab_size // 2] = -torch.inf

    def column(values: list) -> Tensor:
        return torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)])

    noise = torch.rand(rows, generator=generator)
    return logits, (
        column([0.0, 1e-9, 0.3, 1.0, 2.0]),
        column([0, 0, 1, 2, 50, 700, vocab_size, 10**7]).int(),
        column([1.0, 1.0, 1e-9, 0.0, 0.3, 0.9, 0.999]),
        column([0.0, 0.0, 0.05, 1.0]),
        noise,
    )


def near_a_boundary(logits: Tensor, values: Parameters, first: int, second: int) -> bool:
    """Whether two results differ by rounding alone: another step of the reference's noise gives the other one."""
    temperature, top_k, top_p, min_p, noise = values
    found = set()
    for shift_noise in (-1e-4, 0.0, 1e-4):
        for shift_p in (-1e-4, 0.0, 1e-4):
            moved = (noise + shift_noise).clamp(0.0, 1.0 - 2.0**-24)
            found.add(int(sample_reference(logits, temperature, top_k, (top_p + shift_p).clamp(0, 1), min_p, moved)))
    return {first, second} <= found


class TestAgainstTheReference:
    @settings(max_examples=150)
    @given(cases())
    def test_same_tokens(self, case: tuple[Tensor, Parameters]) -> None:
        logits, values = case
        ours, reference = sample(logits, *values), sample_reference(logits, *values)
        for row in torch.nonzero(ours != reference)[:, 0].tolist():
            one = logits[row : row + 1]
            assert near_a_boundary(one, of_row(values, row), int(ours[row]), int(reference[row]))

    @settings(max_examples=150)
    @given(cases())
    def test_a_row_alone_is_the_row_in_the_batch(self, case: tuple[Tensor, Parameters]) -> None:
        logits, values = case
        together = sample(logits, *values)
        for row in range(len(logits)):
            assert sample(logits[row : row + 1], *of_row(values, row)) == together[row : row + 1]

    def test_more_rows_than_are_handled_at_once(self) -> None:
        logits = torch.randn(70, 40_000, generator=torch.Generator().manual_seed(1))
        for values in (parameters(70), parameters(70, top_p=0.7), parameters(70, top_k=30, temperature=0.5)):
            together = sample(logits, *values)
            for row in (0, 25, 26, 27, 69):
                assert sample(logits[row : row + 1], *of_row(values, row)) == together[row : row + 1]

    def test_rows_may_be_cut_from_wider_ones(self) -> None:
        wide = torch.randn(5, 1000, generator=torch.Generator().manual_seed(2))
        for values in (parameters(5), parameters(5, top_p=0.9), parameters(5, temperature=0)):
            assert torch.equal(sample(wide[:, :900], *values), sample(wide[:, :900].contiguous(), *values))

    def test_the_name_of_a_backend_is_honoured(self) -> None:
        logits = torch.randn(3, 50)
        assert torch.equal(
            sample(logits, *parameters(3), backend="reference"), sample_reference(logits, *parameters(3))
        )


class TestAgainstTransformers:
    """The tokens that can be drawn at all are those that transformers' warpers leave."""

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p", "min_p"),
        [(0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.1), (0.8, 20, 0.8, 0.05)],
    )
    def test_support_and_probabilities(self, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 2
        warped = TemperatureLogitsWarper(temperature)(None, logits.clone())
        if top_k:
            warped = TopKLogitsWarper(top_k)(None, warped)
        if top_p < 1:
            warped = TopPLogitsWarper(top_p)(None, warped)
        if min_p:
            warped = MinPLogitsWarper(min_p)(None, warped)
        expected = warped.softmax(-1)[0].double()
        # Noise on a fine grid: each token comes out in proportion to its probability, to within a grid step.
        steps = 20_000
        noise = (torch.arange(steps) + 0.5) / steps
        drawn = sample(logits.expand(steps, -1), *parameters(steps, temperature, top_k, top_p, min_p, noise))
        shares = torch.bincount(drawn, minlength=60).double() / steps
        assert (shares - expected).abs().max() <= 1.5 / steps
        assert (shares[expected == 0] == 0).all()


class TestDistribution:
    @pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (8, 1.0), (0, 0.8)])
    def test_chi_square_over_positions_of_one_seed(self, top_k: int, top_p: float) -> None:
        rows, vocab_size = 40_000, 24
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4))
        noise = uniform(torch.full((rows,), 12345), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
        drawn = sample(logits.expand(rows, -1), *parameters(rows, 1.0, top_k, top_p, 0.0, noise))
        ordered, order = logits[0].double().softmax(0).sort(descending=True)
        keep = (ordered.cumsum(0) - ordered < top_p) & (torch.arange(vocab_size) < (top_k or vocab_size))
        expected = (ordered * keep / (ordered * keep).sum())[keep] * rows
        counts = torch.bincount(drawn, minlength=vocab_size)[order][keep].double()
        assert counts.sum() == rows
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        freedom = int(keep.sum()) - 1
        # Mean and standard deviation of the chi-square distribution; four of them are passed once in 30,000 times.
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)

    def test_noise_is_uniform_over_positions_seeds_and_choices(self) -> None:
        count, bins = 50_000, 50
        zeros, numbers = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        for counters in ((zeros, numbers, zeros), (numbers, zeros, zeros), (zeros, zeros, numbers)):
            noise = uniform(*counters)
            assert float(noise.min()) >= 0.0
            assert float(noise.max()) < 1.0
            counts = torch.histc(noise, bins, 0.0, 1.0).double()
            chi_square = float(((counts - count / bins) ** 2).sum() / (count / bins))
            assert chi_square < bins - 1 + 4 * math.sqrt(2 * (bins - 1))


class TestNoise:
    def test_known_answer(self) -> None:
        """Random123's first known answer of philox4x32-10: key and counter zero."""
        zero = torch.zeros(1, dtype=torch.int64)
        assert float(uniform(zero, zero, zero)) == (0x6627E8D5 >> 8) * 2.0**-24

    @settings(max_examples=50)
    @given(
        st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31)), min_size=1)
    )
    def test_every_version_has_the_same_bits(self, rows: list[tuple[int, int, int]]) -> None:
        seeds, positions, choices = torch.tensor(rows).T.contiguous()
        assert torch.equal(uniform(seeds, positions, choices), uniform_reference(seeds, positions, choices))

    def test_seed_position_and_choice_all_matter(self) -> None:
        counters = [(s, p, c) for s in (0, 1, -1, 2**32, 2**62) for p in (0, 1, 2**16) for c in (0, 1, 9)]
        seeds, positions, choices = torch.tensor(counters).T.contiguous()
        assert len(uniform(seeds, positions, choices).unique()) == len(counters)


class TestEdges:
    @pytest.mark.parametrize(
        "greedy",
        [
            {"temperature": 0},
            {"temperature": 1e-9},
            {"top_p": 1e-9},
            {"top_p": 0},
            {"top_k": 1},
            {"temperature": 1e-4, "top_p": 1e-9},
        ],
    )
    def test_settings_that_leave_one_token_are_greedy(self, greedy: dict) -> None:
        logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(5)) * 10
        logits[:32] = logits[:32].round()  # with ties
        best = torch.from_numpy(logits.numpy().argmax(1))
        assert torch.equal(sample(logits, *parameters(64, **greedy)), best)

    def test_a_temperature_just_above_greedy_is_greedy_where_nothing_ties(self) -> None:
        logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(6)) * 10
        assert torch.equal(sample(logits, *parameters(64, temperature=1e-4)), logits.argmax(1))

    def test_limits_that_limit_nothing_change_nothing(self) -> None:
        logits = torch.randn(32, 700, generator=torch.Generator().manual_seed(7))
        free = sample(logits, *parameters(32))
        for top_k in (700, 701, 10**7):
            assert torch.equal(sample(logits, *parameters(32, top_k=top_k)), free)

    def test_min_p_one_keeps_the_best_alone(self) -> None:
        logits = torch.randn(32, 700, generator=torch.Generator().manual_seed(8))
        assert torch.equal(sample(logits, *parameters(32, min_p=1.0)), logits.argmax(1))

    def test_masked_tokens_are_never_drawn(self) -> None:
        logits = torch.full((2000, 300), -torch.inf)
        logits[:, [7, 200]] = torch.tensor([0.5, 0.4])
        for values in (parameters(2000), parameters(2000, top_k=50), parameters(2000, top_p=0.99)):
            assert set(sample(logits, *values).tolist()) == {7, 200}

    def test_the_largest_noise_stays_inside(self) -> None:
        logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(9))
        logits[:, -100:] = -torch.inf
        noise = torch.full((50,), 1.0 - 2.0**-24)
        for limits in ({}, {"top_k": 900}, {"top_p": 0.95}, {"min_p": 0.01}):
            drawn = sample(logits, *parameters(50, noise=noise, **limits))
            assert (drawn < 4900).all()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_broken_row_names_a_broken_logit_and_harms_no_other(self, bad: float) -> None:
        logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(10))
        alone = sample(logits[2:], *of_row(parameters(3), 2))
        logits[1] = bad
        for limits in ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0}):
            drawn = sample(logits, *parameters(3, **limits))
            assert not math.isfinite(float(logits[1, drawn[1]]))
        assert sample(logits, *parameters(3))[2:] == alone

    def test_columns_of_another_kind_are_refused(self) -> None:
        logits, (temperature, top_k, top_p, min_p, noise) = torch.randn(3, 50), parameters(3)
        with pytest.raises(ValueError, match="top_k"):
            sample(logits, temperature, top_k.long(), top_p, min_p, noise, backend="cpu")
        with pytest.raises(ValueError, match="uniform"):
            sample(logits, temperature, top_k, top_p, min_p, noise[:2], backend="cpu")
        with pytest.raises(ValueError, match="strides"):
            sample(logits.T.contiguous().T, temperature, top_k, top_p, min_p, noise, backend="cpu")
        with pytest.raises(ValueError, match="num_top is 51"):
            token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 51, backend="cpu")

    def test_no_rows(self) -> None:
        assert sample(torch.empty(0, 10), *parameters(0)).shape == (0,)

    def test_all_rows_with_one_token(self) -> None:
        assert np.array_equal(sample(torch.zeros(4, 1), *parameters(4, top_p=0.5)).numpy(), np.zeros(4))


class TestTokenLogprobs:
    @settings(max_examples=60)
    @given(cases(), st.integers(0, 30), st.integers(0, 10**6))
    def test_against_the_reference(self, case: tuple[Tensor, Parameters], num_top: int, seed: int) -> None:
        logits, _ = case
        vocab_size = logits.shape[1]
        num_top = min(num_top, vocab_size)
        ids = torch.randint(0, vocab_size, (len(logits),), generator=torch.Generator().manual_seed(seed))
        ours = token_logprobs(logits, ids, num_top)
        reference = token_logprobs_reference(logits, ids, num_top)
        assert torch.equal(ours[1], reference[1])
        assert torch.equal(ours[2], reference[2])
        torch.testing.assert_close(ours[0], reference[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[3], reference[3], rtol=1e-5, atol=1e-5)
        for row in range(len(logits)):
            one = token_logprobs(logits[row : row + 1], ids[row : row + 1], num_top)
            assert all(torch.equal(part[0], whole[row]) for part, whole in zip(one, ours, strict=True))

    @pytest.mark.parametrize("num_top", [0, 1, 20, 1000, 40_000])
    def test_as_many_as_there_are(self, num_top: int) -> None:
        logits = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(14))
        ids = torch.tensor([5, 39_999])
        for ours, reference in zip(
            token_logprobs(logits, ids, num_top), token_logprobs_reference(logits, ids, num_top), strict=True
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)

    def test_nonsense_stays_in_its_row(self) -> None:
        logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(15))
        ids = torch.tensor([1, 2, 3])
        alone = token_logprobs(logits[2:], ids[2:], 4)
        logits[1, 100:] = math.nan
        own, _, _, top = token_logprobs(logits, ids, 4)
        assert own[1].isnan()
        assert top[1].isnan().all()
        assert own[2] == alone[0][0]


class TestTriton:
    """The kernels for GPUs, interpreted, against the same references."""

    @settings(max_examples=40)
    @given(case=cases())
    def test_same_tokens(self, interpreted: Callable[[str], Any], case: tuple[Tensor, Parameters]) -> None:
        logits, values = case
        gpu = interpreted("sampling")
        ours, reference = gpu.sample(logits, *values), sample_reference(logits, *values)
        for row in torch.nonzero(ours != reference)[:, 0].tolist():
            one = logits[row : row + 1]
            assert near_a_boundary(one, of_row(values, row), int(ours[row]), int(reference[row]))

    def test_several_blocks_and_ties_across_them(self, interpreted: Callable[[str], Any]) -> None:
        gpu = interpreted("sampling")
        logits = torch.randn(6, 2 * gpu.BLOCK + 77, generator=torch.Generator().manual_seed(12)).mul(4).round() / 2
        noise = torch.tensor([0.0, 0.2, 0.5, 0.8, 0.99, 1.0 - 2.0**-24])
        for limits in ({}, {"top_k": 600}, {"top_p": 0.4}, {"top_k": 3000, "top_p": 0.7, "min_p": 0.02}):
            values = parameters(6, 0.8, noise=noise, **limits)
            ours, reference = gpu.sample(logits, *values), sample_reference(logits, *values)
            for row in torch.nonzero(ours != reference)[:, 0].tolist():
                one = logits[row : row + 1]
                assert near_a_boundary(one, of_row(values, row), int(ours[row]), int(reference[row]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_broken_rows(self, interpreted: Callable[[str], Any], bad: float) -> None:
        logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(10))
        logits[1, 60:] = bad
        if bad == -math.inf:
            logits[1] = bad
        drawn = interpreted("sampling").sample(logits, *parameters(3))
        assert not math.isfinite(float(logits[1, drawn[1]]))
        assert torch.equal(drawn[[0, 2]], sample(logits, *parameters(3))[[0, 2]])

    def test_same_noise(self, interpreted: Callable[[str], Any]) -> None:
        generator = torch.Generator().manual_seed(13)
        seeds = torch.randint(-(2**62), 2**62, (300,), generator=generator)
        positions, choices = torch.arange(300) * 7919, torch.arange(300) % 5
        noise = interpreted("sampling").uniform(seeds, positions, choices)
        assert torch.equal(noise, uniform_reference(seeds, positions, choices))

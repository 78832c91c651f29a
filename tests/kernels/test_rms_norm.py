"""The Triton norm, interpreted, against the reference; the reference against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from orcaserve.kernels.rms_norm import rms_norm_reference
from tests.kernels.cpu_cases import TOLERANCES, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 64), (1, 1), (1, 576), (7, 96), (3, 1025)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_matches_reference(
    interpreted: Callable[[str], Any], dtype: torch.dtype, num_tokens: int, hidden: int, with_residual: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + hidden)
    wide = random(generator, 3, num_tokens, 2 * hidden, dtype=dtype)
    x, residual = wide[0, :, hidden:], wide[1, :, :hidden] if with_residual else None  # rows of wider tensors
    weight = random(generator, hidden, dtype=torch.float32)
    out = interpreted("norms").rms_norm(x, weight, 1e-5, residual)
    expected = rms_norm_reference(x, weight, 1e-5, residual)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_reference_is_torchs_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = random(generator, 2, 5, 48, dtype=torch.float32)
    weight = random(generator, 48, dtype=torch.float32)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-6), functional.rms_norm(x, (48,), weight, 1e-6))
    normed, total = rms_norm_reference(x, weight, 1e-6, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (48,), weight, 1e-6))


def test_the_rounded_sum_is_what_is_normalised() -> None:
    """Otherwise a layer's norm would see another residual than the layers after it."""
    x = torch.full((1, 2), 1.0, dtype=torch.bfloat16)
    residual = torch.full((1, 2), 2.0**-10, dtype=torch.bfloat16)  # lost in the sum
    residual[0, 1] = 0.0
    normed, total = rms_norm_reference(x, torch.ones(2), 0.0, residual)
    assert total.tolist() == normed.tolist() == [[1.0, 1.0]]

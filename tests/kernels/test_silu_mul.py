"""The Triton gates, interpreted, against the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from orcaserve.kernels import silu_mul as references
from tests.kernels.cpu_cases import TOLERANCES, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 16), (1, 1), (1, 1024), (5, 1536), (2, 2049)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # sigmoid is then 0, as it should be
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_matches_reference(
    interpreted: Callable[[str], Any], name: str, dtype: torch.dtype, num_tokens: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + size)
    gate, up = (4 * random(generator, num_tokens, 2 * size, dtype=dtype)).chunk(2, dim=1)
    out = getattr(interpreted("gates"), name)(gate, up)
    expected = getattr(references, f"{name}_reference")(gate, up)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_large_inputs_stay_finite(interpreted: Callable[[str], Any], name: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    out = getattr(interpreted("gates"), name)(gate, torch.ones_like(gate))
    assert out.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]

"""Packed products against float64, and the law that a row knows nothing of its batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.kernels import cpu
from orcaserve.kernels.linear import PackedWeight, linear, pack
from tests.kernels.cpu_cases import random, threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")

NATIVE = [torch.float32, torch.bfloat16]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def close(got: torch.Tensor, expected: torch.Tensor, in_features: int) -> None:
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=1e-6 * in_features + rounding / 4, rtol=1e-5 + rounding)


@given(
    rows=st.integers(1, 70),
    in_features=st.integers(1, 200),
    out_features=st.integers(1, 200),
    dtype=st.sampled_from(NATIVE),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_any_shape(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = random(generator, out_features, in_features, dtype=dtype)
    x = random(generator, rows, in_features + 5, dtype=dtype)[:, 5:]
    bias = random(generator, out_features, dtype=dtype) if has_bias else None
    out = linear(x, pack(weight), bias)
    assert out.dtype == dtype
    close(out, exact(x, weight, bias), in_features)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 576), (577, 100), (3, 33)])
def test_a_row_is_the_same_in_any_batch_and_team(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = pack(random(generator, out_features, in_features, dtype=dtype))
    x = random(generator, 130, in_features, dtype=dtype)
    bias = random(generator, out_features, dtype=dtype)
    with threads(1):
        alone = torch.cat([linear(x[row : row + 1], packed, bias) for row in range(len(x))])
    for team in (1, 3):
        with threads(team):
            for rows in (1, 2, 3, 5, 8, 12, 13, 16, 17, 32, 64, 100, 130):
                assert torch.equal(linear(x[:rows], packed, bias), alone[:rows])
                assert torch.equal(linear(x[-rows:], packed, bias), alone[-rows:])


def test_float32_results_of_bfloat16_weights_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = random(generator, 50, 64, dtype=torch.bfloat16), random(generator, 4, 64, dtype=torch.bfloat16)
    out = linear(x, pack(weight), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    close(out, exact(x, weight), 64)
    assert torch.equal(out.bfloat16(), linear(x, pack(weight)))


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(45, 20))
    x = torch.randn(31, 20)
    expected = linear(x, packed)
    poisoned = torch.full((31, 45), torch.nan)
    monkeypatch.setattr("orcaserve.kernels.linear.torch.empty", lambda *_, **__: poisoned)
    assert torch.equal(linear(x, packed), expected)


def test_float16_and_other_layouts_run_torch() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, x = random(generator, 9, 32, dtype=torch.float16), random(generator, 3, 32, dtype=torch.float16)
    packed = pack(weight)
    assert packed.backend == "torch"
    close(linear(x, packed), exact(x, weight), 32)


def test_columns_and_strided_weights_pack_alike() -> None:
    weight = torch.randn(40, 30)
    x = torch.randn(2, 30)
    assert pack(weight).backend == "cpu"
    assert torch.equal(linear(x, pack(weight.t().contiguous().t())), linear(x, pack(weight)))
    assert torch.equal(linear(x.t().contiguous().t(), pack(weight)), linear(x, pack(weight)))


def test_no_rows() -> None:
    assert linear(torch.randn(0, 30), pack(torch.randn(40, 30))).shape == (0, 40)


@pytest.mark.parametrize("x", [torch.randn(2, 31), torch.randn(2, 30).bfloat16()], ids=["features", "dtype"])
def test_mismatches_are_refused(x: torch.Tensor) -> None:
    packed: PackedWeight = pack(torch.randn(40, 30))
    with pytest.raises(ValueError, match=r"the weight 30 of torch.float32"):
        linear(x, packed)

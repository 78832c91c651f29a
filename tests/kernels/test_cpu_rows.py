"""Norms, gates, rotary embedding, KV writes and block copies of the native library against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orcaserve.kernels import cpu
from orcaserve.kernels.block_copy import copy_blocks, copy_blocks_reference
from orcaserve.kernels.kv_write import kv_write, kv_write_reference
from orcaserve.kernels.rms_norm import rms_norm, rms_norm_reference
from orcaserve.kernels.rope import cos_sin_table, rope_kv_write, rope_kv_write_reference
from orcaserve.kernels.silu_mul import gelu_tanh_mul, gelu_tanh_mul_reference, silu_mul, silu_mul_reference
from tests.kernels.cpu_cases import TOLERANCES, batch_of, random, threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")

rows_and_widths = {"rows": st.integers(1, 40), "width": st.integers(1, 300), "seed": st.integers(0, 99)}
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an operation does not write stays NaN."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    monkeypatch.setattr("orcaserve.kernels.cpu.ops.torch.empty", poisoned)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCES[got.dtype], rtol=TOLERANCES[got.dtype])


@given(dtype=dtypes, **rows_and_widths)
@settings(max_examples=60, deadline=None)
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (random(generator, rows, width + 3, dtype=dtype)[:, 3:] for _ in range(2))
    weight = random(generator, width, dtype=torch.float32)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    normed, total = rms_norm(x, weight, 1e-5, residual)
    expected_normed, expected_total = rms_norm_reference(x, weight, 1e-5, residual)
    close(normed, expected_normed)
    assert torch.equal(total, expected_total)


@given(dtype=dtypes, **rows_and_widths)
@settings(max_examples=60, deadline=None)
def test_gates_of_a_fused_projection(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (random(generator, rows, 2 * width, dtype=dtype) * 4).chunk(2, 1)
    close(silu_mul(gate, up), silu_mul_reference(gate, up))
    close(gelu_tanh_mul(gate, up), gelu_tanh_mul_reference(gate, up))


@pytest.mark.parametrize("operation", [silu_mul, gelu_tanh_mul])
def test_gates_saturate(operation) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4]])
    out = operation(gate, torch.ones_like(gate))
    close(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 90.0, 200.0, 1e4]]))


@given(
    query_lens=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    head_dim=st.sampled_from([2, 16, 24, 64, 80, 128]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dtype=dtypes,
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_rope_and_kv_write(
    query_lens: list[int], head_dim: int, num_kv_heads: int, group: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, num_blocks = batch_of(generator, query_lens, [length + 20 for length in query_lens], 16)
    batch.slot_mapping[0] = -1  # padding
    num_heads = num_kv_heads * group
    fused = random(generator, sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], 1)
    table = cos_sin_table(head_dim, 64, {"rope_theta": 10000.0}, 64)
    pool = random(generator, 2, num_blocks, num_kv_heads, 16, head_dim, dtype=dtype)
    expected_pool = pool.clone()
    close(rope_kv_write(q, k, v, table, pool, batch), rope_kv_write_reference(q, k, v, table, expected_pool, batch))
    close(pool, expected_pool)
    kv_write(k, v, pool, batch.slot_mapping)
    kv_write_reference(k, v, expected_pool, batch.slot_mapping)
    assert torch.equal(pool, expected_pool)


def test_copy_blocks() -> None:
    pool = torch.randn(2, 7, 2, 4, 8).bfloat16()
    expected = pool.clone()
    pairs = torch.tensor([[0, 3], [5, 1], [0, 6]])
    copy_blocks(pool, pairs)
    copy_blocks_reference(expected, pairs)
    assert torch.equal(pool, expected)
    copy_blocks(pool, pairs[:0])
    assert torch.equal(pool, expected)


def test_rows_do_not_depend_on_their_batch_or_on_the_team() -> None:
    generator = torch.Generator().manual_seed(1)
    x = random(generator, 300, 576, dtype=torch.bfloat16)
    weight = random(generator, 576, dtype=torch.float32)
    with threads(1):
        normed, gated = rms_norm(x, weight, 1e-6), silu_mul(x, x)
    with threads(4):
        assert torch.equal(rms_norm(x, weight, 1e-6), normed)
        assert torch.equal(silu_mul(x, x), gated)
    for row in (0, 7, 299):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(silu_mul(x[row : row + 1], x[row : row + 1])[0], gated[row])


def test_not_a_number_stays_one() -> None:
    x = torch.full((1, 40), torch.nan, dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(40), 1e-5).isnan().all()
    assert silu_mul(x, x).isnan().all()


def test_refusals_name_the_field() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match="weight is torch"):
        rms_norm(x, torch.randn(8).bfloat16(), 1e-5)
    with pytest.raises(TypeError, match="up is torch"):
        silu_mul(x, x.half())
    with pytest.raises(ValueError, match="side by side"):
        silu_mul(x.t(), x.t())
    with pytest.raises(ValueError, match="side by side"):
        kv_write(
            torch.randn(2, 8, 3).transpose(1, 2), torch.randn(2, 3, 8), torch.zeros(2, 1, 3, 4, 8), torch.tensor([0])
        )

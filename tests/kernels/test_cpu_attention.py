"""The native paged attention against its reference, and the laws on which exact preemption and caching rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orcaserve.kernels import cpu
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.paged_attention import operation, paged_attention, paged_attention_reference
from tests.kernels.cpu_cases import TOLERANCES, batch_of, one_request, pool_of, random, threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")

MIXED = ([1, 1, 5, 130, 1, 70], [1, 300, 900, 130, 1025, 610])  # query and context lengths
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def case(
    seed: int,
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, AttentionBatch]:
    generator = torch.Generator().manual_seed(seed)
    batch, num_blocks = batch_of(generator, query_lens, context_lens, block_size)
    pool = pool_of(generator, batch, num_blocks, num_kv_heads, block_size, head_dim, dtype)
    return random(generator, sum(query_lens), num_heads, head_dim, dtype=dtype), pool, batch


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCES[got.dtype], rtol=TOLERANCES[got.dtype])


@dtypes
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 128, 8), (8, 1, 80, 16), (2, 1, 24, 3), (6, 2, 256, 16), (57, 1, 64, 32), (2, 2, 6, 1)],
)
def test_mixed_batches(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    q, pool, batch = case(1, *MIXED, num_heads, num_kv_heads, head_dim, block_size, dtype)
    for window, softcap in ((0, 0.0), (37, 0.0), (0, 5.0), (300, 30.0), (1, 0.0)):
        expected = paged_attention_reference(q, pool, batch, head_dim**-0.5, window, softcap)
        close(paged_attention(q, pool, batch, head_dim**-0.5, window, softcap, backend="cpu"), expected)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    lens = draw(
        st.lists(
            st.integers(1, 300).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=5
        )
    )
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    head_dim = draw(st.sampled_from([2, 10, 16, 48, 64, 72, 96, 160]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q, pool, batch = case(
        draw(st.integers(0, 99)),
        [q for q, _ in lens],
        [c for _, c in lens],
        num_kv_heads * group,
        num_kv_heads,
        head_dim,
        draw(st.sampled_from([1, 2, 7, 16, 64])),
        dtype,
    )
    window = draw(st.sampled_from([0, 1, 20, 100]))
    softcap = draw(st.sampled_from([0.0, 2.0]))
    expected = paged_attention_reference(q, pool, batch, 0.3, window, softcap)
    close(paged_attention(q, pool, batch, 0.3, window, softcap), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_is_the_same_in_any_batch_chunk_and_team(dtype: torch.dtype, window: int) -> None:
    q, pool, batch = case(2, *MIXED, 9, 3, 64, 16, dtype)
    with threads(1):
        together = paged_attention(q, pool, batch, 0.125, window)
    with threads(3):
        assert torch.equal(together, paged_attention(q, pool, batch, 0.125, window))
    for row in range(batch.num_requests):
        start, query_len = int(batch.query_start[row]), int(batch.query_start[row + 1] - batch.query_start[row])
        for chunk in {1, 3, 17, 64, query_len}:
            for begin in range(0, query_len, chunk):
                end = min(begin + chunk, query_len)
                alone = one_request(batch, row, begin, end)
                rows = slice(start + begin, start + end)
                assert torch.equal(paged_attention(q[rows], pool, alone, 0.125, window), together[rows])


def test_long_contexts_are_split_and_merged() -> None:
    q, pool, batch = case(3, [1, 2, 1], [3000, 4097, 1], 4, 2, 64, 16, torch.float32)
    close(paged_attention(q, pool, batch, 0.125), paged_attention_reference(q, pool, batch, 0.125))


def test_a_strided_query_of_a_fused_projection() -> None:
    q, pool, batch = case(4, [3, 1], [40, 17], 4, 2, 64, 16, torch.bfloat16)
    fused = torch.full((4, 8, 64), torch.nan, dtype=torch.bfloat16)
    fused[:, :4] = q
    assert torch.equal(paged_attention(fused[:, :4], pool, batch, 0.125), paged_attention(q, pool, batch, 0.125))


def test_large_scores_do_not_overflow() -> None:
    q, pool, batch = case(5, [1, 20], [200, 20], 2, 1, 64, 16, torch.float32)
    expected = paged_attention_reference(q * 100, pool, batch, 1.0)
    close(paged_attention(q * 100, pool, batch, 1.0), expected)


def test_no_context_gives_zeros() -> None:
    q, pool, batch = case(6, [1, 1], [5, 3], 2, 1, 64, 16, torch.float32)
    batch.context_lens[1] = 0
    out = paged_attention(q, pool, batch, 0.125)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].isfinite().all()


def test_the_operation_picks_it_on_the_cpu() -> None:
    assert operation.backend_name("cpu") == "cpu"


def test_refuses_what_it_cannot_run() -> None:
    q, pool, batch = case(7, [1], [5], 4, 2, 64, 16, torch.float32)
    with pytest.raises(ValueError, match="3 heads over 2 KV heads"):
        paged_attention(q[:, :3], pool, batch, 0.125)
    with pytest.raises(TypeError, match="kv_cache is torch"):
        paged_attention(q.bfloat16(), pool, batch, 0.125)
    with pytest.raises(ValueError, match="must be contiguous"):
        paged_attention(q, pool.transpose(2, 3).contiguous().transpose(2, 3), batch, 0.125)
    with pytest.raises(TypeError, match="float64"):
        paged_attention(q.double(), pool.double(), batch, 0.125)

"""The Triton attention, interpreted, against the reference; the reference against torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels.dispatch import BackendUnavailable
from orcaserve.kernels.gpu.flashinfer_attention import block_lists
from orcaserve.kernels.gpu.xformers_attention import queries_by_head, split_by_head
from orcaserve.kernels.paged_attention import gather_context, paged_attention, paged_attention_reference
from tests.kernels.cpu_cases import TOLERANCES, batch_of, pool_of, random

Interpreted = Callable[[str], Any]
Heads = tuple[int, int, int]  # query heads, KV heads, head_dim


def assert_matches_reference(
    interpreted: Interpreted,
    query_lens: list[int],
    context_lens: list[int],
    heads: Heads,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_workers: int = 3,
    capability: int = 9,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    attention = interpreted("attention")
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    batch, num_blocks = batch_of(generator, query_lens, context_lens, block_size)
    pool = pool_of(generator, batch, num_blocks, num_kv_heads, block_size, head_dim, dtype)
    q = random(generator, sum(query_lens), num_heads, head_dim, dtype=dtype)
    settings = {"scale": head_dim**-0.5, "window": 0, "softcap": 0.0, **options}
    tiles = attention.choose_tiles(q, num_kv_heads, batch.max_query_len, capability)
    out = attention.launch(q, pool, batch, **settings, tiles=tiles, num_workers=num_workers)
    expected = paged_attention_reference(q, pool, batch, **settings)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    return out


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [1]),
        ([1, 1, 1, 1], [15, 16, 17, 129]),  # decodes around a block's edge, and past a tile's
        ([1, 1, 1], [0, 5, 0]),  # padding requests with nothing to attend to
        ([1], [1025]),
        ([48], [48]),
        ([50], [179]),  # a chunk with context before it
        ([1, 70, 1, 33, 2], [40, 70, 0, 100, 131]),  # prefills, decodes, a padding request and a draft of two
        ([47, 47], [64, 47]),  # every request of the longest length: no decode workers
    ],
)
def test_lengths(interpreted: Interpreted, query_lens: list[int], context_lens: list[int]) -> None:
    assert_matches_reference(interpreted, query_lens, context_lens, (9, 3, 64))


def test_a_long_prefill(interpreted: Interpreted) -> None:
    assert_matches_reference(interpreted, [1025, 1], [1025, 300], (1, 1, 64))


@pytest.mark.parametrize(
    "heads", [(4, 4, 64), (8, 1, 64), (20, 1, 64), (2, 1, 80), (3, 1, 96), (4, 2, 128), (2, 1, 256)]
)
def test_heads(interpreted: Interpreted, heads: Heads) -> None:
    assert_matches_reference(interpreted, [1, 1], [70, 20], heads)
    assert_matches_reference(interpreted, [1, 21], [33, 90], heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_narrow_dtypes(interpreted: Interpreted, dtype: torch.dtype, head_dim: int) -> None:
    assert_matches_reference(interpreted, [1, 1], [200, 31], (4, 2, head_dim), dtype=dtype)
    assert_matches_reference(interpreted, [1, 40], [200, 70], (4, 2, head_dim), dtype=dtype)


@pytest.mark.parametrize("window", [1, 16, 100])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_window_and_softcap(interpreted: Interpreted, window: int, softcap: float) -> None:
    options = {"window": window, "softcap": softcap}
    assert_matches_reference(interpreted, [1, 1], [300, 7], (2, 1, 64), **options)
    assert_matches_reference(interpreted, [1, 150, 3], [170, 290, 140], (2, 1, 64), **options)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 64])
@pytest.mark.parametrize("window", [0, 90])
def test_shares_may_end_anywhere(interpreted: Interpreted, num_workers: int, window: int) -> None:
    """However the work is cut, parts of a request join to the whole."""
    query_lens, context_lens = [1, 2, 1, 1], [350, 130, 1, 64]
    assert_matches_reference(interpreted, query_lens, context_lens, (4, 2, 64), num_workers=num_workers, window=window)


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_block_sizes(interpreted: Interpreted, block_size: int) -> None:
    assert_matches_reference(interpreted, [1, 30], [70, 77], (2, 1, 64), block_size=block_size)


def test_tiles_of_older_cards(interpreted: Interpreted) -> None:
    assert_matches_reference(interpreted, [1, 60], [70, 100], (2, 1, 128), dtype=torch.bfloat16, capability=8)


@given(data=st.data())
@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes here
def test_any_batch(interpreted: Interpreted, data: st.DataObject) -> None:
    requests = data.draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=5), label="(new, before)"
    )
    group = data.draw(st.integers(1, 5), label="group")
    assert_matches_reference(
        interpreted,
        [new for new, _ in requests],
        [new + before for new, before in requests],
        (2 * group, 2, data.draw(st.sampled_from([64, 72]), label="head_dim")),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype"),
        num_workers=data.draw(st.integers(1, 9), label="workers"),
        window=data.draw(st.sampled_from([0, 50]), label="window"),
        seed=data.draw(st.integers(0, 2**16), label="seed"),
    )


def test_no_token_is_no_work(interpreted: Interpreted) -> None:
    attention = interpreted("attention")
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = batch_of(generator, [1], [1], 16)
    pool = pool_of(generator, batch, num_blocks, 1, 16, 64, torch.float32)
    q = torch.zeros(0, 2, 64)
    tiles = attention.choose_tiles(q, 1, 1, 9)
    assert attention.launch(q, pool, batch, 1.0, 0, 0.0, tiles, 3).shape == (0, 2, 64)


def test_queries_may_be_a_view_of_a_wider_tensor(interpreted: Interpreted) -> None:
    attention = interpreted("attention")
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = batch_of(generator, [1, 20], [30, 20], 16)
    pool = pool_of(generator, batch, num_blocks, 2, 16, 64, torch.float32)
    q = random(generator, 21, 8, 64, dtype=torch.float32)[:, :4]
    tiles = attention.choose_tiles(q, 2, 20, 9)
    out = attention.launch(q, pool, batch, 0.125, 0, 0.0, tiles, 2)
    torch.testing.assert_close(out, paged_attention_reference(q, pool, batch, 0.125), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [0, 9])
def test_reference_is_softmax_attention(window: int) -> None:
    """The reference against torch's attention on the gathered context, one request at a time."""
    generator = torch.Generator().manual_seed(1)
    query_lens, context_lens = [1, 12], [40, 33]
    batch, num_blocks = batch_of(generator, query_lens, context_lens, 8)
    pool = pool_of(generator, batch, num_blocks, 2, 8, 32, torch.float32)
    q = random(generator, 13, 6, 32, dtype=torch.float32)
    out = paged_attention_reference(q, pool, batch, 0.2, window=window)
    for row, queries in enumerate(q.split(query_lens)):
        k, v = gather_context(pool, batch.block_tables[row], context_lens[row])
        query_at = torch.arange(context_lens[row] - query_lens[row], context_lens[row])[:, None]
        key_at = torch.arange(context_lens[row])
        mask = (key_at <= query_at) & ((key_at > query_at - window) if window else torch.tensor(True))
        expected = functional.scaled_dot_product_attention(
            queries.transpose(0, 1), k, v, attn_mask=mask, scale=0.2, enable_gqa=True
        )
        torch.testing.assert_close(out.split(query_lens)[row], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "xformers", "flashinfer", "fastest"])
def test_a_named_backend_that_cannot_run_is_an_error(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = batch_of(generator, [1], [3], 16)
    pool = pool_of(generator, batch, num_blocks, 1, 16, 64, torch.float32)
    with pytest.raises(BackendUnavailable) as raised:
        paged_attention(torch.zeros(1, 1, 64), pool, batch, 1.0, backend=backend)
    assert raised.value.backend == backend
    assert raised.value.operation == "paged_attention"


def test_one_request_for_each_kv_head() -> None:
    """What the xformers backend tells xformers: a pool of one-headed blocks, a request for each KV head."""
    generator = torch.Generator().manual_seed(2)
    batch, num_blocks = batch_of(generator, [1, 9], [21, 17], 8)
    pool = pool_of(generator, batch, num_blocks, 3, 8, 16, torch.float32)
    q = random(generator, 10, 6, 16, dtype=torch.float32)
    by_head = paged_attention_reference(
        queries_by_head(q, 3), pool.view(2, -1, 1, 8, 16), split_by_head(batch, 3), 0.25
    )
    out = by_head.view(3, 10, 2, 16).transpose(0, 1).reshape(10, 6, 16)
    torch.testing.assert_close(out, paged_attention_reference(q, pool, batch, 0.25))


def test_block_lists_hold_what_the_contexts_use() -> None:
    """What the flashinfer backend tells flashinfer."""
    batch, _ = batch_of(torch.Generator().manual_seed(3), [1, 9, 4], [21, 16, 4], 8)
    starts, ids, last = block_lists(batch, 8)
    assert starts.tolist() == [0, 3, 5, 6]
    assert ids.tolist() == [*batch.block_tables[0, :3].tolist(), *batch.block_tables[1, :2].tolist(),
                            int(batch.block_tables[2, 0])]  # fmt: skip
    assert last.tolist() == [5, 8, 4]

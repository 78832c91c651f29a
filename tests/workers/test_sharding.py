from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orcaserve.workers.errors import ShardingError
from orcaserve.workers.sharding import Span, even_span, head_shards, mlp_spans, rank_shards

sizes = st.integers(1, 16)


@given(total=st.integers(0, 500), size=sizes)
def test_even_spans_tile_and_differ_by_one(total, size):
    spans = [even_span(total, size, rank) for rank in range(size)]
    assert_tiles(spans, total)
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@given(num_kv_heads=st.integers(1, 8), group=st.integers(1, 8), size=sizes)
def test_every_query_head_is_held_once_beside_its_kv_head(num_kv_heads, group, size):
    num_heads = num_kv_heads * group
    if size > num_kv_heads and -(-size // num_kv_heads) > group:
        with pytest.raises(ShardingError, match=f"tensor_parallel_size={size} .* {num_heads} attention heads"):
            head_shards(num_heads, num_kv_heads, size)
        return
    shards = head_shards(num_heads, num_kv_heads, size)
    assert_tiles([shard.heads for shard in shards], num_heads)
    assert {kv for shard in shards for kv in range(shard.kv_heads.start, shard.kv_heads.stop)} == set(
        range(num_kv_heads)
    )
    for shard in shards:
        assert len(shard.heads) % len(shard.kv_heads) == 0
        read = {head // group for head in range(shard.heads.start, shard.heads.stop)}
        assert read == set(range(shard.kv_heads.start, shard.kv_heads.stop))


@given(columns=st.integers(16, 4000), attention=st.lists(st.integers(0, 10**6), min_size=1, max_size=16))
def test_mlp_spans_tile(columns, attention):
    assert_tiles(mlp_spans(columns, attention, 100), columns)


def test_the_mlp_evens_out_what_the_heads_leave_uneven():
    """SmolLM2-135M at 2 ranks: 6 + 3 heads; in all, each rank reads the same number of weights to 5%."""
    shards = rank_shards(
        num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536, vocab_size=49152, size=2
    )
    assert [len(shard.heads) for shard in shards] == [6, 3]
    weights = [2 * (len(s.heads) + len(s.kv_heads)) * 64 * 576 + 3 * 576 * len(s.mlp) for s in shards]
    assert max(weights) / min(weights) < 1.05


def test_heads_that_no_cut_fits_are_refused_with_the_numbers():
    with pytest.raises(ShardingError, match=r"tensor_parallel_size=10 .* 9 attention heads and 3 KV heads"):
        head_shards(9, 3, 10)
    with pytest.raises(ShardingError, match="not a multiple"):
        head_shards(9, 2, 1)


def assert_tiles(spans: list[Span], total: int) -> None:
    ends = [0] + [span.stop for span in spans]
    assert [span.start for span in spans] == ends[:-1]
    assert ends[-1] == total
    assert all(len(span) >= 0 for span in spans)

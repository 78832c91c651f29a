"""Which heads, MLP columns and vocabulary rows each rank of a tensor-parallel group holds. Pure arithmetic.

Attention is cut by whole KV groups (one KV head and the query heads that read it), unevenly when the ranks do not
divide them. With more ranks than KV heads a KV head is held by several ranks, which share out its query heads. The MLP
evens the work out: a rank with fewer heads takes more of its columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from orcaserve.workers.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of rows or columns."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def scaled(self, width: int) -> slice:
        """The same range where each unit is `width` wide."""
        return slice(self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query heads and KV heads of one rank; the query heads of this span read the KV heads of this span."""

    heads: Span
    kv_heads: Span


def even_span(total: int, size: int, rank: int) -> Span:
    """`total` units over `size` ranks, as even as can be, the first ranks taking one more."""
    each, extra = divmod(total, size)
    start = rank * each + min(rank, extra)
    return Span(start, start + each + (rank < extra))


def head_shards(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShard]:
    """One HeadShard per rank. Raises ShardingError where some rank would have no head."""
    if num_heads % num_kv_heads:
        raise ShardingError(num_heads, num_kv_heads, size, "the attention heads are not a multiple of the KV heads")
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        spans = [even_span(num_kv_heads, size, rank) for rank in range(size)]
        return [HeadShard(Span(kv.start * group, kv.stop * group), kv) for kv in spans]
    shards = []
    for kv_head in range(num_kv_heads):
        num_ranks = len(even_span(size, num_kv_heads, kv_head))
        if num_ranks > group:
            reason = f"{num_ranks} ranks would share the {group} attention heads of one KV head"
            raise ShardingError(num_heads, num_kv_heads, size, f"{reason}; at most {num_heads} ranks are possible")
        for part in (even_span(group, num_ranks, rank) for rank in range(num_ranks)):
            heads = Span(kv_head * group + part.start, kv_head * group + part.stop)
            shards.append(HeadShard(heads, Span(kv_head, kv_head + 1)))
    return shards


def mlp_spans(intermediate_size: int, attention_weights: list[int], weights_per_column: int) -> list[Span]:
    """MLP columns per rank such that each rank reads about the same number of weights in a layer.

    attention_weights: what each rank's attention reads. Spans are cut at multiples that keep matrix kernels happy.
    """
    size = len(attention_weights)
    multiples = (64, 32, 16, 8, 4, 2, 1)
    multiple = next(
        m for m in multiples if m == 1 or (intermediate_size % m == 0 and intermediate_size >= 8 * m * size)
    )
    target = (sum(attention_weights) + intermediate_size * weights_per_column) / size
    wanted = [max(0.0, (target - own) / weights_per_column) for own in attention_weights]
    ends, total = [0], 0.0
    for columns in wanted:
        total += columns
        ends.append(round(total * intermediate_size / sum(wanted) / multiple) * multiple)
    ends[-1] = intermediate_size
    return [Span(start, stop) for start, stop in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class RankShard:
    """Everything that one rank holds of a model."""

    heads: Span
    kv_heads: Span
    mlp: Span
    vocab: Span


def rank_shards(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    size: int,
) -> list[RankShard]:
    """One RankShard per rank. Raises ShardingError."""
    heads = head_shards(num_heads, num_kv_heads, size)
    attention = [2 * (len(shard.heads) + len(shard.kv_heads)) * head_dim * hidden_size for shard in heads]
    mlps = mlp_spans(intermediate_size, attention, 3 * hidden_size)
    return [
        RankShard(shard.heads, shard.kv_heads, mlp, even_span(vocab_size, size, rank))
        for rank, (shard, mlp) in enumerate(zip(heads, mlps, strict=True))
    ]

"""What the GPU benchmark runs: each operation at the sizes that matter, with its reference and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.block_copy import copy_blocks, copy_blocks_reference
from orcaserve.kernels.kv_write import kv_write, kv_write_reference
from orcaserve.kernels.paged_attention import gather_context, paged_attention, paged_attention_reference
from orcaserve.kernels.rms_norm import rms_norm, rms_norm_reference
from orcaserve.kernels.rope import cos_sin_table, rope_kv_write, rope_kv_write_reference
from orcaserve.kernels.sampling import sample, sample_reference
from orcaserve.kernels.silu_mul import gelu_tanh_mul, gelu_tanh_mul_reference, silu_mul, silu_mul_reference

BLOCK_SIZE = 16
Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
LLAMA_8B: Heads = (32, 8, 128)
SMOLLM: Heads = (9, 3, 64)


@dataclass(frozen=True)
class Case:
    """One operation at one size: ours, what it must equal, what it has to move and to compute, and who else can."""

    op: str
    name: str
    call: Callable[[], Any]
    expected: Callable[[], Any] | None  # None: too large for the reference; a smaller case of the op is checked
    num_bytes: int = 0
    num_flops: int = 0
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    checked_call: Callable[[], Any] | None = None  # where `call` changes its input: what is compared with `expected`


def random_batch(query_lens: Sequence[int], context_lens: Sequence[int], device: str) -> tuple[AttentionBatch, int]:
    """Requests with their blocks scattered over the pool; returns the batch and the number of blocks."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in context_lens]
    ids = torch.randperm(sum(num_blocks), dtype=torch.int64)
    tables = torch.zeros(len(query_lens), max(num_blocks), dtype=torch.int64)
    slots, positions, used = [], [], 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        tables[row, : num_blocks[row]] = ids[used : used + num_blocks[row]]
        used += num_blocks[row]
        at = torch.arange(context_len - query_len, context_len)
        positions.append(at)
        slots.append(tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor(context_lens).to(device, torch.int32),
        block_tables=tables.to(device, torch.int32),
        slot_mapping=torch.cat(slots).to(device),
        positions=torch.cat(positions).to(device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    return batch, sum(num_blocks)


def attention_inputs(
    query_lens: Sequence[int], context_lens: Sequence[int], heads: Heads, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionBatch, float]:
    """Queries, pool, batch, scale."""
    num_heads, num_kv_heads, head_dim = heads
    batch, num_blocks = random_batch(query_lens, context_lens, device)
    pool = torch.randn(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=dtype)
    q = torch.randn(sum(query_lens), num_heads, head_dim, device=device, dtype=dtype)
    return q, pool, batch, head_dim**-0.5


def attention_case(
    op: str,
    name: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: Heads,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    softcap: float = 0.0,
    checked: bool = True,
) -> Case:
    """Decode is counted in bytes of the KV pool it has to read, prefill in flops of the pairs that see each other."""
    num_heads, num_kv_heads, head_dim = heads
    inputs = attention_inputs(query_lens, context_lens, heads, device, dtype)
    arguments = (*inputs, window, softcap)
    num_read = 2 * sum(min(length, window or length) for length in context_lens) * num_kv_heads * head_dim
    num_pairs = sum(map(partial(visible_pairs, window), query_lens, context_lens))
    peers: dict[str, Callable[[], Any]] = {
        other: partial(paged_attention, *arguments, backend=other) for other in ("flashinfer", "xformers")
    }
    if not window and not softcap and len({*zip(query_lens, context_lens, strict=True)}) == 1:
        peers |= dense_peers(*inputs, query_lens[0], context_lens[0])
    return Case(
        op=op,
        name=name,
        call=partial(paged_attention, *arguments),
        expected=partial(paged_attention_reference, *arguments) if checked else None,
        num_bytes=(num_read + 2 * inputs[0].numel()) * dtype.itemsize,
        num_flops=0 if max(query_lens) == 1 else 4 * num_heads * head_dim * num_pairs,
        peers=peers,
    )


def visible_pairs(window: int, query_len: int, context_len: int) -> int:
    """How many (query, key) pairs the causal mask, and the window if there is one, leave of a request."""
    first, last = context_len - query_len + 1, context_len  # keys that the first and the last query see
    if not window:
        return (first + last) * query_len // 2
    full = max(last - max(first, window) + 1, 0)  # queries that see a whole window
    growing = query_len - full
    return full * window + (first + first + growing - 1) * growing // 2


def dense_peers(
    q: Tensor, pool: Tensor, batch: AttentionBatch, scale: float, query_len: int, context_len: int
) -> dict[str, Callable[[], Any]]:
    """torch's own attention on keys and values that lie gathered already: it is not charged for the gathering."""
    num_requests = batch.num_requests
    gathered = [gather_context(pool, batch.block_tables[row], context_len) for row in range(num_requests)]
    k, v = (torch.stack(side).contiguous() for side in zip(*gathered, strict=True))
    queries = q.unflatten(0, (num_requests, query_len)).transpose(1, 2).contiguous()
    before = context_len - query_len

    def flex() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: j <= i + before, None, None, query_len, context_len, q.device)
        compiled = torch.compile(flex_attention)
        return partial(compiled, queries, k, v, block_mask=mask, scale=scale, enable_gqa=True)

    mask = None
    if query_len > 1 and before > 0:
        at = torch.arange(context_len, device=q.device)
        mask = at <= at[before:].unsqueeze(1)
    sdpa = partial(functional.scaled_dot_product_attention, queries, k, v, attn_mask=mask,
                   is_causal=query_len == context_len, scale=scale, enable_gqa=True)  # fmt: skip
    return {"sdpa": sdpa, "flex": Once(flex)}


class Once:
    """A call whose costly making happens at the first use."""

    def __init__(self, make: Callable[[], Callable[[], Any]]) -> None:
        self._make = make
        self._made: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made()


def attention_decode(device: str) -> Iterator[Case]:
    for num_requests, context_len, heads in (
        (1, 4096, LLAMA_8B), (1, 131_072, LLAMA_8B), (8, 4096, LLAMA_8B), (32, 4096, LLAMA_8B), (128, 2048, LLAMA_8B),
        (16, 256, SMOLLM)
    ):  # fmt: skip
        name = f"{num_requests} x {context_len}, {heads[0]}:{heads[1]}x{heads[2]}"
        yield attention_case("attention_decode", name, [1] * num_requests, [context_len] * num_requests, heads, device)
    uneven = [131_072, *[512] * 63]
    yield attention_case("attention_decode", "one of 131072 among 63 x 512", [1] * 64, uneven, LLAMA_8B, device)
    yield attention_case("attention_decode", "8 x 16384, window 4096", [1] * 8, [16_384] * 8, LLAMA_8B, device,
                         window=4096)  # fmt: skip


def attention_prefill(device: str) -> Iterator[Case]:
    for num_requests, query_len, context_len, heads in (
        (1, 2048, 2048, LLAMA_8B), (4, 2048, 2048, LLAMA_8B), (1, 8192, 8192, LLAMA_8B), (1, 2048, 16_384, LLAMA_8B),
        (4, 2048, 2048, SMOLLM), (2, 2048, 2048, (16, 8, 256))
    ):  # fmt: skip
        name = f"{num_requests} x {query_len} of {context_len}, {heads[0]}:{heads[1]}x{heads[2]}"
        yield attention_case("attention_prefill", name, [query_len] * num_requests, [context_len] * num_requests, heads,
                             device, checked=query_len * context_len <= 2048 * 2048)  # fmt: skip


def attention_mixed(device: str) -> Iterator[Case]:
    query_lens, context_lens = [1] * 32 + [512, 300, 3], [4096] * 32 + [2048, 300, 1500]
    yield attention_case(
        "attention_mixed", "32 decodes, two chunks, a draft", query_lens, context_lens, LLAMA_8B, device
    )
    yield attention_case("attention_mixed", "the same, window and softcap", query_lens, context_lens, LLAMA_8B, device,
                         window=1024, softcap=30.0)  # fmt: skip


def attention_odd(device: str) -> Iterator[Case]:
    """Here the answer matters, not the time: what the tests run in the interpreter, on the real thing."""
    query_lens, context_lens = [1, 70, 1, 33, 2, 1], [15, 70, 1025, 100, 131, 4097]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads in (SMOLLM, LLAMA_8B, (4, 4, 80), (8, 1, 96), (20, 1, 64), (4, 2, 256)):
            name = f"{heads[0]}:{heads[1]}x{heads[2]} {str(dtype).removeprefix('torch.')}"
            for step, some in (("decode", [1] * 6), ("mixed", query_lens)):
                yield attention_case("attention_odd", f"{step} {name}", some, context_lens, heads, device, dtype)
            yield attention_case("attention_odd", f"window, softcap {name}", query_lens, context_lens, heads, device,
                                 dtype, window=100, softcap=20.0)  # fmt: skip


def attention_tiles(device: str) -> Iterator[Case]:
    """Other tile sizes than the default's, for whoever tunes."""
    from orcaserve.kernels.gpu.attention import DECODE_CANDIDATES, PREFILL_CANDIDATES, device_facts, launch

    for step, query_lens, candidates in (
        ("decode", [1] * 32, DECODE_CANDIDATES),
        ("prefill", [4096], PREFILL_CANDIDATES),
    ):
        context_lens = [4096] * len(query_lens)
        default = attention_case("attention_tiles", step, query_lens, context_lens, LLAMA_8B, device, checked=False)
        inputs = attention_inputs(query_lens, context_lens, LLAMA_8B, device, torch.bfloat16)
        for tiles in candidates:
            num_workers = tiles.workers_per_processor * device_facts(torch.cuda.current_device())[0]
            numbers = "x".join(map(str, astuple(tiles)))
            yield Case("attention_tiles", f"{step} {numbers}", partial(launch, *inputs, 0, 0.0, tiles, num_workers),
                       partial(paged_attention, *inputs), default.num_bytes, default.num_flops)  # fmt: skip


def norms(device: str, num_tokens: int = 8192, hidden: int = 4096) -> Iterator[Case]:
    x, residual = torch.randn(2, num_tokens, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(hidden, device=device)
    plain, added = (x, weight, 1e-5), (x, weight, 1e-5, residual)
    size = f"{num_tokens} x {hidden}"
    yield Case("rms_norm", size, partial(rms_norm, *plain), partial(rms_norm_reference, *plain), 4 * x.numel(),
               peers={"torch": partial(functional.rms_norm, x, (hidden,), weight.bfloat16(), 1e-5)})  # fmt: skip
    yield Case("rms_norm", f"{size} with residual", partial(rms_norm, *added), partial(rms_norm_reference, *added),
               8 * x.numel())  # fmt: skip


def gates(device: str, num_tokens: int = 8192, size: int = 14_336) -> Iterator[Case]:
    halves = torch.randn(num_tokens, 2 * size, device=device, dtype=torch.bfloat16).chunk(2, dim=1)
    num_bytes = 6 * num_tokens * size
    for name, ours, expected in (
        ("silu", silu_mul, silu_mul_reference), ("gelu_tanh", gelu_tanh_mul, gelu_tanh_mul_reference)
    ):  # fmt: skip
        yield Case("silu_mul", f"{name} {num_tokens} x {size}", partial(ours, *halves), partial(expected, *halves),
                   num_bytes)  # fmt: skip


class PoolWrite:
    """A write into the KV pool as one of these cases: timed on one pool, checked on a pool of zeros."""

    def __init__(self, device: str, num_tokens: int, heads: Heads) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.batch, num_blocks = random_batch([num_tokens], [num_tokens], device)
        self.fused = torch.randn(
            num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=torch.bfloat16
        )
        self.q, self.k, self.v = self.fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        self.pool = torch.zeros(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=torch.bfloat16)
        self.size = f"{num_tokens} x {num_heads}:{num_kv_heads}x{head_dim}"

    def case(self, op: str, ours: Callable[[Tensor], Any], expected: Callable[[Tensor], Any], num_bytes: int) -> Case:
        return Case(op, self.size, partial(ours, self.pool), partial(self._left, expected), num_bytes,
                    checked_call=partial(self._left, ours))  # fmt: skip

    def _left(self, write: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
        """What the write leaves in the pool, and what it returns."""
        pool = torch.zeros_like(self.pool)
        returned = write(pool)
        return (pool,) if returned is None else (pool, returned)


def rope_writes(device: str, num_tokens: int = 8192, heads: Heads = LLAMA_8B) -> Iterator[Case]:
    w = PoolWrite(device, num_tokens, heads)
    table = cos_sin_table(heads[2], num_tokens, {"rope_theta": 10_000.0}, num_tokens).to(device)
    yield w.case(
        "rope_kv_write",
        lambda pool: rope_kv_write(w.q, w.k, w.v, table, pool, w.batch),
        lambda pool: rope_kv_write_reference(w.q, w.k, w.v, table, pool, w.batch),
        4 * w.fused.numel() + 4 * table.numel(),
    )


def plain_writes(device: str, num_tokens: int = 8192, heads: Heads = LLAMA_8B) -> Iterator[Case]:
    w = PoolWrite(device, num_tokens, heads)
    yield w.case(
        "kv_write",
        lambda pool: kv_write(w.k, w.v, pool, w.batch.slot_mapping),
        lambda pool: kv_write_reference(w.k, w.v, pool, w.batch.slot_mapping),
        8 * w.k.numel(),
    )


def block_copies(device: str, num_pairs: int = 512, heads: Heads = LLAMA_8B) -> Iterator[Case]:
    _, num_kv_heads, head_dim = heads
    pool = torch.randn(2, 2 * num_pairs, num_kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=torch.bfloat16)
    pairs = torch.randperm(2 * num_pairs, device=device).view(num_pairs, 2)

    def copied(copy: Callable[[Tensor, Tensor], None]) -> Tensor:
        target = pool.clone()
        copy(target, pairs)
        return target

    yield Case("copy_blocks", f"{num_pairs} blocks", partial(copy_blocks, pool, pairs),
               partial(copied, copy_blocks_reference), num_bytes=4 * num_pairs * pool[0, 0].nbytes,
               checked_call=partial(copied, copy_blocks))  # fmt: skip


def samples(device: str, rows: int = 256, vocab: int = 128_256) -> Iterator[Case]:
    """At least the logits are read once; the reference sorts."""
    logits = torch.randn(rows, vocab, device=device)
    fill = partial(torch.full, (rows,), device=device)
    noise = torch.rand(rows, device=device)
    kinds = (("greedy", 0.0, 0, 1.0), ("temperature", 1.0, 0, 1.0), ("top-k, top-p", 0.8, 50, 0.9))
    for name, heat, top_k, top_p in kinds:
        arguments = (logits, fill(heat), fill(top_k, dtype=torch.int32), fill(top_p), fill(0.0), noise)
        yield Case("sample", f"{name} {rows} x {vocab}", partial(sample, *arguments),
                   partial(sample_reference, *arguments), logits.numel() * 4)  # fmt: skip


BUILDERS: dict[str, Callable[[str], Iterator[Case]]] = {
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "attention_mixed": attention_mixed,
    "attention_odd": attention_odd,
    "attention_tiles": attention_tiles,
    "rms_norm": norms,
    "silu_mul": gates,
    "rope_kv_write": rope_writes,
    "kv_write": plain_writes,
    "copy_blocks": block_copies,
    "sample": samples,
}

"""Launches the paged attention kernels: tile sizes, the number of workers, the room for partial results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.gpu.attention_kernel import attention_kernel, merge_kernel
from orcaserve.kernels.gpu.launch import next_power_of_two

MAX_HEAD_DIM = 256
MIN_UNITS = 2  # key tiles a worker takes at least: less would be all prologue


@dataclass(frozen=True, slots=True)
class Tiles:
    """One configuration of the attention kernel."""

    block_m: int  # rows of a prefill tile: tokens x query heads of one KV head
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    workers_per_processor: int  # decode workers in flight on a multiprocessor, by registers and shared memory


def decode_tiles(head_dim: int, element_bytes: int, group: int) -> Tiles:
    """For a step of short requests alone, which memory bounds: small tiles, many bytes in flight.

    At 64 keys of head_dim 128 in bf16 a worker holds 70 KiB, so three fit a processor of an H100, with 96 KiB on their
    way at any time; by Little's law 4.8 TB/s x 0.7 us / 132 processors asks for 25 KiB.
    """
    row_bytes = next_power_of_two(head_dim) * element_bytes
    tile_bytes = 16384 if element_bytes == 2 else 8192  # float32 needs twice the registers for its three products
    block_n = max(16, min(128, tile_bytes // row_bytes))
    light = element_bytes == 2 and row_bytes <= 256 and group <= 16  # at most 168 registers a thread
    return Tiles(block_m=16, block_n=block_n, num_warps=4, num_stages=3, workers_per_processor=3 if light else 2)


def mixed_tiles(head_dim: int, element_bytes: int, capability_major: int) -> Tiles:
    """For a step with prefill chunks, which the tensor cores bound. The largest tiles that do not spill (aot.py).

    128 rows: fewer would ask the L2 cache for more bytes a flop than it has. 128 keys on Hopper at head_dim 128: with
    64 the product of queries and keys reads 128 bytes of shared memory a cycle, all there is.
    """
    head_pad = next_power_of_two(head_dim)
    hopper = capability_major >= 9
    if element_bytes == 4:
        block_m, block_n, num_warps, num_stages = FLOAT32_TILES[max(head_pad, 64)]
    elif head_pad <= 64:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3
    elif head_pad <= 128:
        block_m, block_n, num_warps, num_stages = (128, 128, 8, 2) if hopper else (128, 32, 8, 3)
    else:
        block_m, block_n, num_warps, num_stages = (128, 32, 8, 2) if hopper else (64, 32, 8, 2)
    return Tiles(block_m, block_n, num_warps, num_stages, workers_per_processor=1)


FLOAT32_TILES = {64: (64, 32, 4, 2), 128: (32, 16, 4, 2), 256: (16, 16, 8, 2)}

# What the benchmark times beside the defaults, at head_dim 128 in bf16.
DECODE_CANDIDATES = (
    Tiles(16, 64, 4, 3, 2),
    Tiles(16, 64, 4, 4, 2),
    Tiles(16, 128, 4, 2, 2),
    Tiles(16, 128, 8, 3, 1),
    Tiles(16, 32, 4, 4, 4),
)
PREFILL_CANDIDATES = (
    Tiles(128, 64, 8, 2, 1),
    Tiles(128, 64, 8, 3, 1),
    Tiles(128, 64, 8, 4, 1),
    Tiles(64, 64, 4, 3, 1),
    Tiles(64, 128, 4, 2, 1),
)


@lru_cache
def device_facts(device_index: int) -> tuple[int, int]:
    """The number of multiprocessors and the major compute capability."""
    properties = torch.cuda.get_device_properties(device_index)
    return properties.multi_processor_count, properties.major


def choose_tiles(q: Tensor, num_kv_heads: int, max_query_len: int, capability_major: int) -> Tiles:
    group = q.shape[1] // num_kv_heads
    if max_query_len > short_query_len(group):
        return mixed_tiles(q.shape[2], q.element_size(), capability_major)
    return decode_tiles(q.shape[2], q.element_size(), group)


def short_rows(group: int) -> int:
    """Rows of a decode tile: tl.dot wants at least 16, and all heads of a group share the keys they load."""
    return max(16, next_power_of_two(group))


def short_query_len(group: int) -> int:
    """Requests with up to this many tokens in a step (a decode, or a draft to verify) are split over their context."""
    return short_rows(group) // group


def paged_attention(
    q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    num_processors, capability_major = device_facts(q.device.index)
    tiles = choose_tiles(q, kv_cache.shape[2], batch.max_query_len, capability_major)
    num_workers = tiles.workers_per_processor * num_processors
    return launch(q, kv_cache, batch, scale, window, softcap, tiles, num_workers)


def launch(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    softcap: float,
    tiles: Tiles,
    num_workers: int,
) -> Tensor:
    """One attention launch, then the merge if there can be anything to merge. Reads no tensor on the host."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    check_shapes(q, kv_cache)
    group = num_heads // num_kv_heads
    num_requests = batch.num_requests
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out

    short_m = short_rows(group)
    prefill = batch.max_query_len > short_m // group
    block_m = max(tiles.block_m, short_m)
    num_prefill_tiles = num_tokens // (block_m // group) + num_requests if prefill else 0
    # All requests of the longest length: then no short one is among them.
    if prefill and num_tokens == num_requests * batch.max_query_len:
        num_workers = 0
    head_pad = next_power_of_two(head_dim)
    requests_pad = max(16, next_power_of_two(num_requests))
    parts = 2 * num_workers * short_m
    partial_acc = torch.empty(parts * head_pad, dtype=torch.float32, device=q.device)
    partial_top = torch.empty(2 * parts, dtype=torch.float32, device=q.device)
    partial_total = partial_top[parts:]

    attention_kernel[(num_workers + num_prefill_tiles * num_kv_heads,)](
        q, q.stride(0), kv_cache, kv_cache.stride(0), batch.query_start, batch.context_lens, batch.block_tables,
        batch.block_tables.stride(0), num_requests, num_workers, num_prefill_tiles, scale, softcap, out, partial_acc,
        partial_top, partial_total, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size, WINDOW=window, SOFTCAP=softcap > 0, PREFILL=prefill, SHORT_M=short_m, BLOCK_M=block_m,
        BLOCK_N=tiles.block_n, REQUESTS_PAD=requests_pad, MIN_UNITS=MIN_UNITS, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    if num_workers > 0:
        merge_kernel[(num_requests, num_kv_heads)](
            batch.query_start, batch.context_lens, num_requests, num_workers, out, partial_acc, partial_top,
            partial_total, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad, WINDOW=window,
            SHORT_M=short_m, BLOCK_N=tiles.block_n, REQUESTS_PAD=requests_pad, MIN_UNITS=MIN_UNITS, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def check_shapes(q: Tensor, kv_cache: Tensor) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    assert head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly"
    assert kv_cache.shape[4] == head_dim, f"the pool has head_dim {kv_cache.shape[4]}, the query {head_dim}"
    assert kv_cache.dtype == q.dtype, f"the pool is {kv_cache.dtype}, the query {q.dtype}"
    assert kv_cache.is_contiguous(), "the pool is dense"
    assert q.stride()[1:] == (head_dim, 1), "the heads of a query lie densely in a row"

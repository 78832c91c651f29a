"""Writes into the KV pool in Triton: rotary embedding with the write, the plain write, the block copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.gpu.launch import next_power_of_two, warps_for

ELEMENTS = 2048  # that a program holds at a time: 4 warps with 16 of them a thread
COPY_ELEMENTS = 4096


@triton.jit
def _slot_place(slot, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    block = slot // BLOCK_SIZE
    return ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def rope_kv_kernel(
    q, q_stride, k, k_stride, v, v_stride, cos_sin, positions, slot_mapping, kv_cache, v_offset, q_out,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Grid: (num_tokens, tiles of query heads, then tiles of KV heads)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tl.arange(0, HALF_PAD)
    lane = tl.arange(0, BLOCK_H)
    in_half = column < HALF
    angle = cos_sin + tl.load(positions + token) * HEAD_DIM + column
    cos = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=in_half, other=0.0)[None, :]
    if tile < Q_TILES:
        head = tile * BLOCK_H + lane
        real = (head < NUM_HEADS)[:, None] & in_half[None, :]
        source = q + token * q_stride + (head * HEAD_DIM)[:, None] + column[None, :]
        first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        target = q_out + token * (NUM_HEADS * HEAD_DIM) + (head * HEAD_DIM)[:, None] + column[None, :]
        tl.store(target, (first * cos - second * sin).to(q_out.dtype.element_ty), mask=real)
        tl.store(target + HALF, (second * cos + first * sin).to(q_out.dtype.element_ty), mask=real)
    else:
        slot = tl.load(slot_mapping + token)
        head = (tile - Q_TILES) * BLOCK_H + lane
        num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        real = (head < num_written)[:, None] & in_half[None, :]
        source = k + token * k_stride + (head * HEAD_DIM)[:, None] + column[None, :]
        first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        target = kv_cache + _slot_place(slot, head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)[:, None] + column[None, :]
        tl.store(target, (first * cos - second * sin).to(kv_cache.dtype.element_ty), mask=real)
        tl.store(target + HALF, (second * cos + first * sin).to(kv_cache.dtype.element_ty), mask=real)
        source = v + token * v_stride + (head * HEAD_DIM)[:, None] + column[None, :]
        tl.store(target + v_offset, tl.load(source, mask=real), mask=real)
        tl.store(target + v_offset + HALF, tl.load(source + HALF, mask=real), mask=real)


@triton.jit
def kv_write_kernel(
    k, k_stride, v, v_stride, slot_mapping, kv_cache, v_offset, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Grid: (num_tokens, tiles of KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, HEAD_PAD)
    slot = tl.load(slot_mapping + token)
    num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
    real = (head < num_written)[:, None] & (column < HEAD_DIM)[None, :]
    inner = (head * HEAD_DIM)[:, None] + column[None, :]
    target = kv_cache + _slot_place(slot, head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)[:, None] + column[None, :]
    tl.store(target, tl.load(k + token * k_stride + inner, mask=real), mask=real)
    tl.store(target + v_offset, tl.load(v + token * v_stride + inner, mask=real), mask=real)


@triton.jit
def copy_blocks_kernel(kv_cache, v_offset, pairs, BLOCK_ELEMENTS: tl.constexpr, TILE: tl.constexpr):
    """Grid: (num_pairs, K and V, tiles of a block)."""
    pair = pairs + tl.program_id(0) * 2
    place = tl.program_id(2) * TILE + tl.arange(0, TILE)
    real = place < BLOCK_ELEMENTS
    plane = kv_cache + tl.program_id(1) * v_offset
    content = tl.load(plane + tl.load(pair) * BLOCK_ELEMENTS + place, mask=real)
    tl.store(plane + tl.load(pair + 1) * BLOCK_ELEMENTS + place, content, mask=real)


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert cos_sin.stride() == (head_dim, 1), "cos_sin is [positions, head_dim]"
    assert kv_cache.is_contiguous()
    if num_tokens > 0:
        half_pad = next_power_of_two(head_dim // 2)
        block_h = min(next_power_of_two(num_heads), max(ELEMENTS // 2 // half_pad, 1))
        grid = (num_tokens, -(-num_heads // block_h) + -(-num_kv_heads // block_h))
        rope_kv_kernel[grid](
            q, q.stride(0), k, k.stride(0), v, v.stride(0), cos_sin, batch.positions, batch.slot_mapping, kv_cache,
            kv_cache.stride(0), q_out, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_SIZE=kv_cache.shape[3], HALF_PAD=half_pad, BLOCK_H=block_h, num_warps=warps_for(half_pad * block_h),
            enable_fp_fusion=True
        )  # fmt: skip
    return q_out


def kv_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    assert kv_cache.is_contiguous()
    if num_tokens > 0:
        head_pad = next_power_of_two(head_dim)
        block_h = min(next_power_of_two(num_kv_heads), max(ELEMENTS // head_pad, 1))
        kv_write_kernel[num_tokens, -(-num_kv_heads // block_h)](
            k, k.stride(0), v, v.stride(0), slot_mapping, kv_cache, kv_cache.stride(0), NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim, BLOCK_SIZE=kv_cache.shape[3], HEAD_PAD=head_pad, BLOCK_H=block_h,
            num_warps=warps_for(head_pad * block_h), enable_fp_fusion=True
        )  # fmt: skip


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    assert kv_cache.is_contiguous()
    assert pairs.stride() == (2, 1), "pairs is [num_pairs, 2]"
    block_elements = kv_cache.stride(1)
    if pairs.shape[0] > 0:
        grid = (pairs.shape[0], 2, -(-block_elements // COPY_ELEMENTS))
        copy_blocks_kernel[grid](
            kv_cache, kv_cache.stride(0), pairs, BLOCK_ELEMENTS=block_elements, TILE=COPY_ELEMENTS, num_warps=8,
            enable_fp_fusion=True
        )  # fmt: skip

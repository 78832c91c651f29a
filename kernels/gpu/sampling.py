"""Sampling in Triton: one program a row, which reads its logits several times (from the second on out of the L2 cache).

Nothing is sorted. The last kept token of top-k and top-p is found by bisection between two logits: each round sums the
count or the weight of all logits from a pivot on, and moves one of the two to the nearest logit on its side of it, so
that it ends exactly, after about as many rounds as the range of the logits has bits over their spacing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NOISE_BLOCK = 128
MIN_TEMPERATURE = tl.constexpr(1e-5)
DEPTH = tl.constexpr(104.0)  # exp(-104) is 0 in float32: a token so many temperatures below the best is never drawn


@triton.jit
def _load(x, start, vocab, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(x + column, mask=column < vocab, other=-float("inf")), column


@triton.jit
def _find_best(x, vocab, BLOCK: tl.constexpr):
    """The largest logit, its first id, the smallest finite logit, and the first id that holds NaN (or vocab)."""
    best = -float("inf")
    lowest = float("inf")
    best_id = 0
    broken_id = vocab
    for start in range(0, vocab, BLOCK):
        value, column = _load(x, start, vocab, BLOCK)
        is_nan = value != value
        broken_id = tl.minimum(broken_id, tl.min(tl.where(is_nan, column, vocab), 0))
        top = tl.max(tl.where(is_nan, -float("inf"), value), 0)
        first = tl.min(tl.where(value == top, column, vocab), 0)
        best_id = tl.where(top > best, first, best_id)
        best = tl.maximum(best, top)
        finite = (value > -float("inf")) & (value == value)
        lowest = tl.minimum(lowest, tl.min(tl.where(finite, value, float("inf")), 0))
    return best, best_id, lowest, broken_id


@triton.jit
def _from(x, vocab, pivot, best, inverse, BLOCK: tl.constexpr):
    """Of the logits from `pivot` on: number, weight, smallest; and the largest of the others."""
    count = 0
    weight = 0.0
    above = float("inf")
    below = -float("inf")
    for start in range(0, vocab, BLOCK):
        value, _ = _load(x, start, vocab, BLOCK)
        is_from = value >= pivot
        count += tl.sum(is_from.to(tl.int32), 0)
        weight += tl.sum(tl.where(is_from, tl.exp((value - best) * inverse), 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(is_from, value, float("inf")), 0))
        below = tl.maximum(below, tl.max(tl.where(is_from, -float("inf"), value), 0))
    return count, weight, above, below


@triton.jit
def _beyond(x, vocab, pivot, best, inverse, BLOCK: tl.constexpr):
    """Number and weight of the logits above `pivot`, and the number of those equal to it."""
    count = 0
    weight = 0.0
    num_equal = 0
    for start in range(0, vocab, BLOCK):
        value, _ = _load(x, start, vocab, BLOCK)
        is_beyond = value > pivot
        count += tl.sum(is_beyond.to(tl.int32), 0)
        weight += tl.sum(tl.where(is_beyond, tl.exp((value - best) * inverse), 0.0), 0)
        num_equal += tl.sum((value == pivot).to(tl.int32), 0)
    return count, weight, num_equal


@triton.jit
def _largest_with(x, vocab, low, need, best, inverse, COUNTING: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit such that those from it on reach `need` in number or in weight; `low` is taken to do so."""
    high = best
    while low < high:
        pivot = low + 0.5 * (high - low)
        pivot = tl.where(pivot > low, pivot, high)
        count, weight, above, below = _from(x, vocab, pivot, best, inverse, BLOCK)
        if COUNTING:
            reached = count.to(tl.float32) >= need
        else:
            reached = weight >= need
        low = tl.where(reached, above, low)
        high = tl.where(reached, high, tl.maximum(below, low))
    return low


@triton.jit
def _kept_weights(x, start, vocab, cut, num_ties, min_p, best, inverse, BLOCK: tl.constexpr):
    """Weights of one block, 0 for what is not kept; the number of its logits equal to `cut`; their ids."""
    value, column = _load(x, start, vocab, BLOCK)
    is_tie = (value == cut).to(tl.int32)
    keep = (value > cut) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= num_ties))
    weight = tl.exp((value - best) * inverse)
    return tl.where(keep & (weight >= min_p), weight, 0.0), tl.sum(is_tie, 0), column


@triton.jit
def _draw(x, vocab, cut, num_ties, min_p, best, inverse, uniform, BLOCK: tl.constexpr):
    """Of the logits above `cut`, and the first `num_ties` equal to it, the one where the running sum passes the target.

    The second pass adds up block by block as the first did, so that it ends with the same total. Should rounding hide
    the place where the sum passes, it is the last one that counts.
    """
    total = 0.0
    ties_left = num_ties
    for start in range(0, vocab, BLOCK):
        weight, num_equal, _ = _kept_weights(x, start, vocab, cut, ties_left, min_p, best, inverse, BLOCK)
        total += tl.sum(weight, 0)
        ties_left -= num_equal
    target = uniform * total
    running = 0.0
    ties_left = num_ties
    chosen = 0
    found = False
    start = 0
    while (start < vocab) & (not found):
        weight, num_equal, column = _kept_weights(x, start, vocab, cut, ties_left, min_p, best, inverse, BLOCK)
        passed = (weight > 0) & (running + tl.cumsum(weight, 0) > target)
        first = tl.min(tl.where(passed, column, vocab), 0)
        last = tl.max(tl.where(weight > 0, column, chosen), 0)
        running += tl.sum(weight, 0)
        found = running > target
        chosen = tl.where(found & (first < vocab), first, last)
        ties_left -= num_equal
        start += BLOCK
    return chosen


@triton.jit
def sample_kernel(
    logits, stride, vocab, temperature, top_k, top_p, min_p, uniform, out, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    heat = tl.load(temperature + row)
    best, chosen, lowest, broken_id = _find_best(x, vocab, BLOCK)
    is_broken = broken_id < vocab
    chosen = tl.where(is_broken, broken_id, chosen)
    is_finite = (best > -float("inf")) & (best < float("inf"))
    if (heat >= MIN_TEMPERATURE) & is_finite & (not is_broken):
        inverse = 1.0 / heat
        limit = tl.load(top_k + row)
        share = tl.load(top_p + row)
        cut = tl.maximum(lowest, best - DEPTH * heat)
        num_ties = vocab
        if (limit > 0) & (limit < vocab):
            cut = _largest_with(x, vocab, cut, limit.to(tl.float32), best, inverse, True, BLOCK)
            num_beyond, _, _ = _beyond(x, vocab, cut, best, inverse, BLOCK)
            num_ties = limit - num_beyond
        if share < 1.0:
            _, beyond, num_equal = _beyond(x, vocab, cut, best, inverse, BLOCK)
            num_ties = tl.minimum(num_ties, num_equal)
            need = share * (beyond + num_ties.to(tl.float32) * tl.exp((cut - best) * inverse))
            nucleus_cut = _largest_with(x, vocab, cut, need, best, inverse, False, BLOCK)
            _, beyond, _ = _beyond(x, vocab, nucleus_cut, best, inverse, BLOCK)
            wanted = tl.ceil((need - beyond) / tl.exp((nucleus_cut - best) * inverse))
            wanted = tl.minimum(tl.maximum(wanted, 1.0), vocab.to(tl.float32)).to(tl.int32)
            num_ties = tl.where(nucleus_cut > cut, wanted, tl.minimum(wanted, num_ties))
            cut = nucleus_cut
        noise = tl.load(uniform + row)
        chosen = _draw(x, vocab, cut, num_ties, tl.load(min_p + row), best, inverse, noise, BLOCK)
    tl.store(out + row, chosen.to(tl.int64))


@triton.jit
def uniform_kernel(seeds, positions, choices, out, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    seed = tl.load(seeds + row, mask=real, other=0)
    position = tl.load(positions + row, mask=real, other=0).to(tl.uint32)
    choice = tl.load(choices + row, mask=real, other=0).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    word, _, _, _ = tl.philox(seed, position, choice, zero, zero)
    tl.store(out + row, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=real)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    rows, vocab = logits.shape
    logits = logits.float()
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "a row lies densely"
    if rows > 0:
        sample_kernel[(rows,)](
            logits, logits.stride(0), vocab, temperature, top_k, top_p, min_p, uniform, out, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip
    return out


def uniform(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    rows = seeds.shape[0]
    out = torch.empty(rows, dtype=torch.float32, device=seeds.device)
    if rows > 0:
        grid = (-(-rows // NOISE_BLOCK),)
        uniform_kernel[grid](seeds, positions, choices, out, rows, BLOCK=NOISE_BLOCK, num_warps=4)
    return out

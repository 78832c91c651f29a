"""Sampling on the CPU in numpy: greedy rows cost one pass, and only the candidates that can matter are sorted.

Sums that decide a row are taken over its own elements in an order of their own (blocks of one row, or fixed-point
integers, which add up to the same in any order), so that a row's token does not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orcaserve.kernels.sampling import (
    MIN_TEMPERATURE,
    PHILOX_KEY_STEPS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    UNIFORM_BITS,
)

BLOCK = 1024  # weights whose sum is searched as one
STRIDES = (64, 8)  # elements a maximum stands for when the k-th largest is bounded; the coarsest that has k maxima
COLUMN_BITS = 20  # of a sort key: row (12) | logit, largest first (32) | column
MAX_ROWS = 1 << (64 - 32 - COLUMN_BITS)
PART_ELEMENTS = 1 << 20  # rows handled at once hold this many logits: what they need on the way stays in the cache
ONE = float(1 << 40)  # the best token's weight as a fixed-point integer: 2**18 of them still fit in an int64
LOWEST = np.finfo(np.float32).min


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """See kernels.sampling.sample."""
    x = logits.numpy() if logits.dtype == torch.float32 else logits.float().numpy()
    assert x.shape[1] < 1 << COLUMN_BITS, f"a vocabulary of {x.shape[1]}"
    chosen = x.argmax(axis=1)
    rows = np.arange(len(x))
    best = x[rows, chosen]
    sampled = (temperature.numpy() >= MIN_TEMPERATURE) & np.isfinite(best)
    if not sampled.any():
        return torch.from_numpy(chosen)
    vocab_size = x.shape[1]
    k = np.where(top_k.numpy() >= vocab_size, 0, top_k.numpy())
    p, low = top_p.numpy(), min_p.numpy()
    cut = sampled & ((k > 0) | (p < 1.0) | (low > 0.0))
    inverse = np.reciprocal(temperature.numpy(), where=sampled, out=np.ones_like(best))
    u = uniform.numpy()

    at_once = max(PART_ELEMENTS // vocab_size, 1)
    for whole in _parts(np.flatnonzero(sampled & ~cut), at_once):
        chosen[whole] = _sample_whole(x, whole, best[whole], inverse[whole], u[whole])
    for some in _parts(np.flatnonzero(cut), at_once):
        chosen[some] = _sample_cut(x, some, best[some], inverse[some], k[some], p[some], low[some], u[some])
    return torch.from_numpy(chosen)


def uniform(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    """See kernels.sampling.uniform."""
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = seeds.numpy().view(np.uint64)
    key_low, key_high = key & word, key >> shift
    c0, c1 = positions.numpy().view(np.uint64) & word, choices.numpy().view(np.uint64) & word
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    first, second = (np.uint64(multiplier) for multiplier in PHILOX_MULTIPLIERS)
    low_step, high_step = (np.uint64(step) for step in PHILOX_KEY_STEPS)
    for _ in range(PHILOX_ROUNDS):
        even, odd = c0 * first, c2 * second
        c0, c1, c2, c3 = (odd >> shift) ^ c1 ^ key_low, odd & word, (even >> shift) ^ c3 ^ key_high, even & word
        key_low, key_high = (key_low + low_step) & word, (key_high + high_step) & word
    scaled = (c0 >> np.uint64(32 - UNIFORM_BITS)).astype(np.float32)
    scaled *= np.float32(2.0**-UNIFORM_BITS)
    return torch.from_numpy(scaled)


def _parts(rows: np.ndarray, at_once: int) -> list[np.ndarray]:
    at_once = min(at_once, MAX_ROWS)
    return [rows[start : start + at_once] for start in range(0, len(rows), at_once)]


def _take(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return x if len(rows) == len(x) else x[rows]


def _weights(x: np.ndarray, best: np.ndarray, inverse: np.ndarray, padding: int = 0) -> np.ndarray:
    """exp((x - best) / temperature), with this many zeros at the end of each row. The best one's is exactly 1."""
    out = torch.empty(x.shape[0], x.shape[1] + padding)
    real = out[:, : x.shape[1]]
    torch.sub(torch.from_numpy(x), torch.from_numpy(best)[:, None], out=real)
    real.mul_(torch.from_numpy(inverse)[:, None])
    out[:, x.shape[1] :] = -torch.inf
    return out.exp_().numpy()


def _sample_whole(x: np.ndarray, rows: np.ndarray, best: np.ndarray, inverse: np.ndarray, u: np.ndarray) -> np.ndarray:
    """From the whole vocabulary: find the block where the running sum passes the target, then the token in it."""
    weights = _weights(_take(x, rows), best, inverse, -x.shape[1] % BLOCK).reshape(len(rows), -1, BLOCK)
    running = weights.sum(axis=2).cumsum(axis=1, dtype=np.float64)
    target = u * running[:, -1]
    index = np.arange(len(rows))
    block = (running > target[:, None]).argmax(axis=1)
    rest = target - np.where(block > 0, running[index, block - 1], 0.0)
    inside = weights[index, block].cumsum(axis=1, dtype=np.float64)
    # The block's sum and its running sum may differ in the last bit: then it is the block's last possible token.
    rest = np.minimum(rest, np.nextafter(inside[:, -1], 0.0))
    return block * BLOCK + (inside > rest[:, None]).argmax(axis=1)


def _sample_cut(
    x: np.ndarray,
    rows: np.ndarray,
    best: np.ndarray,
    inverse: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    u: np.ndarray,
) -> np.ndarray:
    """From a part of the vocabulary: pick out a superset of it by one threshold a row, then sort that alone."""
    x = _take(x, rows)
    bound, total = _bounds(x, best, inverse, top_k, top_p, min_p)
    row, column = np.divmod(np.flatnonzero(x >= bound[:, None]), x.shape[1])
    value = x[row, column]
    weight = (np.exp((value - best[row]) * inverse[row]) * ONE).astype(np.int64)
    key = _sort_key(value, row, column)
    last = _last_kept(key, weight, row, total, top_k, top_p, min_p)

    kept = np.flatnonzero(key <= last[row])
    row, column, weight = row[kept], column[kept], weight[kept]
    running, start = _running_sums(weight, row, len(rows))
    end = np.append(start[1:], len(row)) - 1
    target = (u * running[end].astype(np.float64)).astype(np.int64)
    return column[start + np.add.reduceat((running <= target[row]).astype(np.int64), start)]


def _bounds(
    x: np.ndarray,
    best: np.ndarray,
    inverse: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """A logit for each row below which nothing is kept, and the sum of weights that top_p is a share of.

    top_k: the k-th largest of some elements is at most the k-th largest of all. top_p: the tokens lighter than
    (1 - top_p) * sum / vocab weigh less than 1 - top_p together, so the ones that are not contain the nucleus.
    The sum is only filled in for rows with top_p and no top_k; rows with top_k know theirs when they are sorted.
    """
    bound = np.full(len(x), LOWEST)
    total = np.zeros(len(x), np.int64)
    for stride in STRIDES:
        num_maxima = x.shape[1] // stride
        coarse = np.flatnonzero((top_k > 0) & (top_k <= num_maxima) & (bound == LOWEST))
        if len(coarse):
            some = _take(x, coarse)[:, : num_maxima * stride].reshape(len(coarse), stride, num_maxima)
            maxima = np.sort(some.max(axis=1), axis=1)
            bound[coarse] = np.maximum(maxima[np.arange(len(coarse)), num_maxima - top_k[coarse]], LOWEST)
    nucleus = np.flatnonzero((top_k == 0) & (top_p < 1.0))
    # min_p comes after a top_p whose sum top_k determines, so that it may not thin out that sum.
    share = np.where((top_k > 0) & (top_p < 1.0), 0.0, min_p)
    if len(nucleus):
        weights = _weights(_take(x, nucleus), best[nucleus], inverse[nucleus])
        sums = weights.sum(axis=1, dtype=np.float64)
        total[nucleus] = (sums * ONE).astype(np.int64)
        share[nucleus] = np.maximum(share[nucleus], (1.0 - top_p[nucleus]) * sums / x.shape[1])
    with np.errstate(divide="ignore"):
        lightest = np.log(share * 0.999)  # the thousandth is for the rounding of exp and log
    return np.maximum(bound, (best + lightest / inverse).astype(np.float32)), total


def _last_kept(
    key: np.ndarray,
    weight: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    """The sort key of each row's last kept token."""
    order = np.argsort(key)
    key, weight = key[order], weight[order]
    num_rows = len(total)
    running, start = _running_sums(weight, row, num_rows)
    rank = np.arange(len(row)) - start[row]
    end = np.append(start[1:], len(row)) - 1
    kth = np.where(top_k > 0, np.minimum(start + top_k - 1, end), end)
    share = np.where(total > 0, total, running[kth]).astype(np.float64) * top_p
    keep = (running - weight < share[row]) & (weight >= min_p[row] * ONE)
    keep &= rank < np.where(top_k > 0, top_k, len(row))[row]
    keep |= rank == 0
    # What is kept is a prefix, so that its length says where it ends.
    return key[start + np.add.reduceat(keep.astype(np.int64), start) - 1]


def _running_sums(weight: np.ndarray, row: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Running sums that begin anew with each row, and where each row begins; every row has an element."""
    start = np.searchsorted(row, np.arange(num_rows))
    running = weight.cumsum()
    return running - (running[start] - weight[start])[row], start


def _sort_key(value: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """uint64 that orders by row, then by descending value, then by column."""
    bits = (value + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0, its equal
    ascending = bits ^ np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    descending = (~ascending).astype(np.uint64)
    return (row.astype(np.uint64) << np.uint64(52)) | (descending << np.uint64(20)) | column.astype(np.uint64)

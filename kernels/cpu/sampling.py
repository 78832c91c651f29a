"""The native sampling operations on torch tensors. Semantics: kernels/sampling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.cpu.library import library

MAX_VOCAB = 1 << 22  # weights are sums of so many 2**40 at most: they fit in 63 bits


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    rows, vocab = logits.shape
    if not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"sample: a vocabulary of {vocab} tokens; 1 to {MAX_VOCAB} are possible")
    logits = logits.float()
    if logits.stride(1) != 1 and vocab > 1:
        raise ValueError(f"sample: logits with strides {logits.stride()}; those of a row must lie side by side")
    chosen = torch.empty(rows, dtype=torch.int64)
    library().orca_sample(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        _column("temperature", temperature, rows, torch.float32),
        _column("top_k", top_k, rows, torch.int32),
        _column("top_p", top_p, rows, torch.float32),
        _column("min_p", min_p, rows, torch.float32),
        _column("uniform", uniform, rows, torch.float32),
        chosen.data_ptr(),
    )
    return chosen


def uniform(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    rows = seeds.shape[0]
    noise = torch.empty(rows, dtype=torch.float32)
    library().orca_uniform(
        _column("seeds", seeds, rows, torch.int64),
        _column("positions", positions, rows, torch.int64),
        _column("choices", choices, rows, torch.int64),
        noise.data_ptr(),
        rows,
    )
    return noise


def _column(name: str, values: Tensor, rows: int, dtype: torch.dtype) -> int:
    """The address of one number for each row."""
    if values.shape != (rows,) or values.dtype != dtype or not values.is_contiguous():
        raise ValueError(f"{name}: {values.dtype} {tuple(values.shape)}, not contiguous {dtype} ({rows},)")
    return values.data_ptr()

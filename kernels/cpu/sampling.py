"""The native sampling operations on torch tensors. Semantics: kernels/sampling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.cpu.library import library

MAX_VOCAB = 1 << 22  # weights are sums of so many 2**40 at most: they fit in 63 bits


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    logits = _checked("sample", logits)
    rows, vocab = logits.shape
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


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = _checked("token_logprobs", logits)
    rows, vocab = logits.shape
    if not 0 <= num_top <= vocab:
        raise ValueError(f"token_logprobs: num_top is {num_top}, the vocabulary {vocab}")
    own, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    top_ids, top = torch.empty((rows, num_top), dtype=torch.int64), torch.empty((rows, num_top))
    library().orca_token_logprobs(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        _column("token_ids", token_ids, rows, torch.int64),
        num_top,
        own.data_ptr(),
        ranks.data_ptr(),
        top_ids.data_ptr(),
        top.data_ptr(),
    )
    return own, ranks, top_ids, top


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


def _checked(operation: str, logits: Tensor) -> Tensor:
    vocab = logits.shape[1]
    if not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"{operation}: a vocabulary of {vocab} tokens; 1 to {MAX_VOCAB} are possible")
    if logits.stride(1) != 1 and vocab > 1:
        raise ValueError(f"{operation}: logits with strides {logits.stride()}; those of a row must lie side by side")
    return logits.float()


def _column(name: str, values: Tensor, rows: int, dtype: torch.dtype) -> int:
    """The address of one number for each row."""
    if values.shape != (rows,) or values.dtype != dtype or not values.is_contiguous():
        raise ValueError(f"{name}: {values.dtype} {tuple(values.shape)}, not contiguous {dtype} ({rows},)")
    return values.data_ptr()

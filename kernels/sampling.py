"""The choice of the next token: greedy, temperature, top-k, top-p and min-p, with one uniform number a row.

What `sample` computes, for each row on its own. Tokens are ordered by logit, equal ones by id. Of that order it keeps
the first `top_k`; of those, renormalised, the shortest prefix whose probability reaches `top_p`; of those, the ones
at least `min_p` times as likely as the best (the order of steps of transformers). The token is then the first of the
kept ones *in order of id* at which the running sum of probability exceeds `uniform` times the sum of all kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu

MIN_TEMPERATURE = 1e-5  # below it a row is greedy: 1 / temperature would leave float32 behind

PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_ROUNDS = 10
WORD = 0xFFFFFFFF
UNIFORM_BITS = 24  # what a float32 in [0, 1) can hold


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    backend: str = "auto",
) -> Tensor:
    """One token id a row: int64 [rows] from float32 logits [rows, vocab].

    All parameters are [rows]: float32, `top_k` int32 (0 is no limit), `uniform` in [0, 1). A temperature below
    `MIN_TEMPERATURE` is greedy, the lowest id among equals. Logits may be -inf (never sampled, unless the whole row
    is). A row that holds NaN or whose best is not finite yields the id of such a logit: look at the logit there.
    A row's result depends on that row alone.
    """
    run = sample_operation.implementation(logits.device.type, backend)
    return run(logits, temperature, top_k, top_p, min_p, uniform)


def uniform(seeds: Tensor, positions: Tensor, choices: Tensor, backend: str = "auto") -> Tensor:
    """Counter-based noise: float32 [rows] in [0, 1), a function of (seed, position, choice) and nothing else.

    All are int64 [rows]; a seed is 64 bits, its sign being one of them. Philox4x32-10 (Salmon, Moraes, Dror, Shaw:
    Parallel random numbers: as easy as 1, 2, 3; SC 2011) with the seed as key and (position, choice, 0, 0) as
    counter; the upper 24 bits of the first word. The same bits on every device.
    """
    return uniform_operation.implementation(seeds.device.type, backend)(seeds, positions, choices)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of float32 logits [rows, vocab] at one id a row (int64 [rows]), and at the `num_top` largest.

    Returns (logprobs [rows], ranks [rows] from 1, top ids [rows, num_top] best first, their logprobs). Of equal logits
    the lower id comes first. A row with NaN has NaN for logprobs.
    """
    return token_logprobs_operation.implementation(logits.device.type, backend)(logits, token_ids, num_top)


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    vocab_size = logits.shape[1]
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    best, best_logit = order[:, 0], ordered[:, 0]
    greedy = (temperature < MIN_TEMPERATURE) | ~best_logit.isfinite()
    inverse = torch.where(greedy, 1.0, temperature).reciprocal()
    weight = ((ordered - torch.where(greedy, 0.0, best_logit)[:, None]) * inverse[:, None]).exp().double()
    weight[greedy] = 1.0

    rank = torch.arange(vocab_size, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab_size)
    weight = weight * (rank < limit[:, None])
    before = weight.cumsum(-1) - weight
    keep = (before < top_p.double()[:, None] * weight.sum(-1, keepdim=True)) | (rank == 0)
    keep &= weight >= min_p[:, None] * weight[:, :1]
    weight = weight * keep

    by_id = torch.zeros_like(weight).scatter_(1, order, weight)
    running = by_id.cumsum(-1)
    target = uniform.double() * running[:, -1]
    chosen = (running > target[:, None]).to(torch.uint8).argmax(-1)
    return torch.where(greedy, best, chosen)


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logits > logits.gather(1, token_ids[:, None])).sum(-1) + 1
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return own[:, 0], ranks, top_ids, logprobs.gather(1, top_ids)


def uniform_reference(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    # int64 holds the bits of a 32 x 32 bit product whatever its sign, so shifts are followed by a mask.
    key_low, key_high = seeds & WORD, (seeds >> 32) & WORD
    c0, c1 = positions & WORD, choices & WORD
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        even, odd = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((odd >> 32) & WORD) ^ c1 ^ key_low,
            odd & WORD,
            ((even >> 32) & WORD) ^ c3 ^ key_high,
            even & WORD,
        )
        key_low, key_high = (key_low + PHILOX_KEY_STEPS[0]) & WORD, (key_high + PHILOX_KEY_STEPS[1]) & WORD
    return (c0 >> (32 - UNIFORM_BITS)).float() * 2.0**-UNIFORM_BITS


def _load_triton_sample() -> Implementation:
    from orcaserve.kernels.gpu.sampling import sample

    return sample


def _load_triton_uniform() -> Implementation:
    from orcaserve.kernels.gpu.sampling import uniform

    return uniform


sample_operation = Operation("sample", sample_reference, {"triton": _load_triton_sample, "cpu": native_cpu("sample")})
uniform_operation = Operation(
    "uniform", uniform_reference, {"triton": _load_triton_uniform, "cpu": native_cpu("uniform")}
)
token_logprobs_operation = Operation("token_logprobs", token_logprobs_reference, {"cpu": native_cpu("token_logprobs")})

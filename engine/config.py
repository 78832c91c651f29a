"""Limits and choices of the scheduler: resolved once by the command line, frozen, passed on."""

from __future__ import annotations

from typing import Literal

import msgspec

SchedulingPolicy = Literal["fcfs", "priority", "fair", "deadline"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Flag names are vLLM's where vLLM has the flag (`--max-num-seqs`, ...)."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int = 16  # tokens
    max_num_seqs: int = 64  # slots per group
    max_num_batched_tokens: int = 512  # token budget of one step of one group
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: the budget
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    queue_timeout_s: float = 0.0  # 0: none
    watermark: float = 0.01  # share of blocks kept free when admitting
    max_steps_in_flight: int = 2  # 1: plan a step only when the one before it is applied
    num_speculative_tokens: int = 0
    tenant_weights: dict[str, float] = {}
    max_group_losses: int = 2  # a request that has killed this many groups is ended with an error


def check_config(config: SchedulerConfig) -> None:
    """Raise ValueError, naming the flag, where the limits contradict one another."""
    for name in ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("num_speculative_tokens", "long_prefill_token_threshold", "max_queued_requests", "queue_timeout_s"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")
    if not 0 <= config.watermark < 1:
        raise ValueError(f"watermark must be in [0, 1), got {config.watermark}")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ValueError(
            f"without chunked prefill a prompt is computed in one step: max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) must be at least max_model_len ({config.max_model_len})"
        )
    for tenant, weight in config.tenant_weights.items():
        if not weight > 0:
            raise ValueError(f"tenant_weights: {tenant!r} must be positive, got {weight}")

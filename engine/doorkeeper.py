"""Refuses at the door, with numbers: what cannot be served at all, and what finds the queue full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter, QueueFull, RequestRefused
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.meter import Meter
from orcaserve.engine.policy import WaitingQueue

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class Capacity(Protocol):
    """What the door must know of a group."""

    draining: bool

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...


class Doorkeeper:
    """Requests for which a slot is free do not count as queued: a burst may fill the slots and then the queue."""

    def __init__(
        self, config: SchedulerConfig, groups: Mapping[int, Capacity], queue: WaitingQueue, meter: Meter
    ) -> None:
        self._config = config
        self._groups = groups
        self._queue = queue
        self._meter = meter

    def check(self, request: GenerateRequest) -> None:
        """Raise a RequestRefused, or let it pass."""
        self._check_request(request)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._check_memory(request)
        if not request.output_token_ids:  # one that was accepted before is not turned away
            self._check_queue(num_tokens)

    def _check_request(self, request: GenerateRequest) -> None:
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if not num_prompt:
            raise InvalidParameter("the prompt has no tokens", "prompt")
        if max_tokens < 1:
            raise InvalidParameter(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
        if request.n < 1:
            raise InvalidParameter(f"n must be at least 1, got {request.n}", "n")
        if request.n > 1 and request.output_token_ids:
            raise InvalidParameter("a resumed request is one choice; n must be 1", "n")
        if num_prompt + max_tokens > self._config.max_model_len:
            raise ContextLengthExceeded(num_prompt, max_tokens, self._config.max_model_len)
        if request.num_group_losses >= self._config.max_group_losses:
            raise RequestRefused(f"{request.num_group_losses} groups were lost while they ran this request")

    def _check_memory(self, request: GenerateRequest) -> None:
        """Groups that are yet to come may be of any size; those that are here say what fits."""
        num_prompt, size = len(request.prompt_token_ids), self._config.block_size
        groups = self._groups.values()
        if groups and not any(num_prompt <= group.num_blocks * size for group in groups):
            most = max(group.num_blocks for group in groups) * size
            raise ContextLengthExceeded(num_prompt, request.sampling.max_tokens, most)

    def _check_queue(self, num_tokens: int) -> None:
        config, queue = self._config, self._queue
        if len(queue) >= config.max_queued_requests and len(queue) >= config.max_queued_requests + self._free_slots():
            raise QueueFull(f"{len(queue)} requests are waiting, {config.max_queued_requests} may", self._retry_after())
        if len(queue) and queue.num_tokens + num_tokens > config.max_queued_tokens:
            raise QueueFull(
                f"{queue.num_tokens} prompt tokens are waiting, {config.max_queued_tokens} may", self._retry_after()
            )

    def _free_slots(self) -> int:
        return sum(group.num_free_slots for group in self._groups.values() if not group.draining)

    def _retry_after(self) -> float:
        """The time that the queue takes at the rate measured lately: what is in it has to be computed first."""
        rate = self._meter.tokens_per_s
        estimate = self._queue.num_tokens / rate if rate else MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, estimate))

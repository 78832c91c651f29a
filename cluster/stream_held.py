"""What a router keeps of a request until it is answered: the request, the ids so far, the deltas not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import msgspec

from orcaserve.engine.messages import GenerateRequest, TokenDelta

_MAX_MERGED_TOKENS = 64  # of deltas that a slow reader gets as one


@dataclass(slots=True)
class HeldChoice:
    """One of a request's n answers, as far as it is known here."""

    index: int
    ids: list[int]
    started: bool = False
    finished: bool = False


@dataclass(slots=True)
class Held:
    """A request that is not answered in full yet."""

    request: GenerateRequest
    choices: list[HeldChoice]
    wire_ids: list[str]
    verdict: asyncio.Future[None] | None  # until the scheduler has said yes or no
    num_losses: int = 0  # of schedulers in a row that it was said to and got no token from
    progressed: bool = False  # has got a token from this scheduler
    on_hold: bool = False  # not said to this scheduler yet
    arrived: deque[TokenDelta] = field(default_factory=deque)
    reader: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Of its prompt and its answers so far."""
        return len(self.request.prompt_token_ids) + sum(len(choice.ids) for choice in self.choices)

    def deliver(self, delta: TokenDelta) -> bool:
        """Put it where the reader finds it. True when nothing was there: then the reader may have to be woken."""
        arrived = self.arrived
        if not arrived:
            arrived.append(delta)
            return True
        if _may_merge(arrived[-1], delta):
            arrived[-1] = _merged(arrived[-1], delta)
        else:
            arrived.append(delta)
        return False

    def wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


def as_continued(delta: TokenDelta, request_id: str, started: bool) -> TokenDelta:
    """The delta under the name that the client knows; what belongs to a first delta is not said twice."""
    if started:
        return msgspec.structs.replace(
            delta, request_id=request_id, prompt_logprobs=None, num_cached_tokens=0, queue_s=0.0
        )
    return msgspec.structs.replace(delta, request_id=request_id)


def _may_merge(former: TokenDelta, delta: TokenDelta) -> bool:
    return (
        former.choice_index == delta.choice_index
        and former.logprobs is None
        and delta.logprobs is None
        and delta.finish_reason in (None, "stop", "length")
        and len(former.token_ids) < _MAX_MERGED_TOKENS
    )


def _merged(former: TokenDelta, delta: TokenDelta) -> TokenDelta:
    """Both as one, for a reader who has not come for the former yet: it costs no more than one."""
    return TokenDelta(
        delta.request_id,
        delta.choice_index,
        former.token_ids + delta.token_ids,
        delta.finish_reason,
        prompt_logprobs=former.prompt_logprobs,
        num_cached_tokens=former.num_cached_tokens,
        stop_token_id=delta.stop_token_id,
        queue_s=former.queue_s,
    )

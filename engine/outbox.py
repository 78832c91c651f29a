"""Deltas on their way out, by stream."""

from __future__ import annotations

from orcaserve.engine.messages import FinishReason, TokenDelta, TokenLogprobs
from orcaserve.engine.request import Request

Deltas = dict[int, list[TokenDelta]]


class Outbox:
    """Filled by whatever ends requests or yields tokens; emptied by the call that hands deltas out."""

    def __init__(self) -> None:
        self._deltas: Deltas = {}

    def take(self) -> Deltas:
        deltas, self._deltas = self._deltas, {}
        return deltas

    def drop(self, request_id: str, choice_index: int | None = None) -> None:
        """Forget what was not handed out yet: nobody wants it, or the same choice starts anew."""
        for deltas in self._deltas.values():
            deltas[:] = [
                delta
                for delta in deltas
                if delta.request_id != request_id or choice_index not in (None, delta.choice_index)
            ]

    def drop_stream(self, stream: int) -> None:
        self._deltas.pop(stream, None)

    def stream(self, stream: int) -> list[TokenDelta]:
        deltas = self._deltas.get(stream)
        if deltas is None:
            deltas = self._deltas[stream] = []
        return deltas

    def tokens(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        stop_token_id: int | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        """New tokens; the first delta of a request also says what happened before it."""
        first = not request.reported
        request.reported = True
        self.stream(request.stream).append(
            TokenDelta(
                request.request_id,
                request.choice_index,
                token_ids,
                reason,
                logprobs[: len(token_ids)] if logprobs is not None else None,
                request.prompt_logprobs if first and request.prompt_logprobs else None,
                request.num_cached_tokens if first else 0,
                stop_token_id,
                request.queue_s if first else 0.0,
            )
        )

    def end(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """A last delta without tokens."""
        self.stream(request.stream).append(
            TokenDelta(request.request_id, request.choice_index, (), reason, error=error)
        )

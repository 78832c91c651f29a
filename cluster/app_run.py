"""Runs a job on the engine: deltas of tokens in, pieces of text out, the same for streams and whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from orcaserve.cluster.app_job import Choice, Job, Part, Piece
from orcaserve.cluster.errors import DeadlineExceeded, GenerationFailed, QueueTimeout
from orcaserve.cluster.figures import FigureSet
from orcaserve.cluster.wire import ClusterStatus, View
from orcaserve.engine.errors import RequestRefused, Unavailable
from orcaserve.engine.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs


class DeltaStream(Protocol):
    """The deltas of one request. Closing it aborts what is still running."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...

    def abort(self, choice_index: int) -> None: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """The router's end of the line to the scheduler (stream.EngineStream)."""

    async def submit(self, request: GenerateRequest) -> DeltaStream: ...

    async def status(self) -> ClusterStatus: ...

    async def view(self, after: int | None = None, traced: bool = False) -> View: ...

    def report(self, figures: FigureSet) -> bool: ...

    @property
    def leaving(self) -> bool: ...


class Run:
    """One job under way. Iterate `pieces()`; what the usage needs is counted on the way."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self._engine = engine
        self._streams: dict[str, DeltaStream] = {}  # by the part's request id
        self._pumps: list[asyncio.Task[None]] = []
        self.num_prompt_tokens = sum(map(len, job.prompts))
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.num_generated_tokens = 0  # by this server for this call: without what a resumed stream brought along
        self.prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.sum_logprobs: dict[int, float] = {}  # by choice, for best_of
        self.queue_s = 0.0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Ends when every choice has ended. Raises RequestRefused, before the first piece or after it.

        Close the iterator to abort: nothing of the job is left on the engine after that.
        """
        for ended in self.job.ended:
            choice = ended.choice
            self.num_completion_tokens += choice.num_tokens
            text = choice.decoder.finish()
            yield Piece(choice.index, text, (), [], ended.finish_reason, ended.stop_reason, first=True)
        if self.job.echo_only and not any(part.request.sampling.prompt_logprobs is not None for part in self.job.parts):
            for part in self.job.parts:
                for choice in part.choices.values():
                    yield Piece(choice.index, "", (), [], "length", prompt=part.prompt, first=True)
            return
        try:
            for part in self.job.parts:
                self._streams[part.request.request_id] = await self._submitted(part)
            if len(self.job.parts) == 1:
                [part] = self.job.parts
                async for delta in self._streams[part.request.request_id]:
                    if (piece := self._piece_of(part, delta)) is not None:
                        yield piece
            else:
                async for part, delta in self._merged():
                    if (piece := self._piece_of(part, delta)) is not None:
                        yield piece
        finally:
            await self.close()

    async def close(self) -> None:
        """Abort what is left."""
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams.values():
            await stream.aclose()

    async def _submitted(self, part: Part) -> DeltaStream:
        try:
            return await self._engine.submit(part.request)
        except RequestRefused as refused:
            if refused.param == "messages" and self.job.kind == "completion":
                refused.param = "prompt"  # the engine does not know by which name its prompt came in
            raise

    async def _merged(self) -> AsyncIterator[tuple[Part, TokenDelta]]:
        arrived: asyncio.Queue[tuple[Part, TokenDelta | RequestRefused | None]] = asyncio.Queue()

        async def pump(part: Part, stream: DeltaStream) -> None:
            try:
                async for delta in stream:
                    arrived.put_nowait((part, delta))
                arrived.put_nowait((part, None))
            except RequestRefused as refused:
                arrived.put_nowait((part, refused))

        for part in self.job.parts:
            self._pumps.append(asyncio.create_task(pump(part, self._streams[part.request.request_id])))
        num_open = len(self._pumps)
        while num_open:
            part, delta = await arrived.get()
            if isinstance(delta, TokenDelta):
                yield part, delta
            elif delta is None:
                num_open -= 1
            else:
                raise delta

    def _piece_of(self, part: Part, delta: TokenDelta) -> Piece | None:
        choice = part.choices[delta.choice_index]
        if choice.finished:  # its stop string came; the engine did not know yet
            return None
        if not choice.started:
            self._note_first(part, choice, delta)
        if delta.finish_reason is not None and delta.finish_reason not in ("stop", "length"):
            raise _failure(part, delta)
        if self.job.echo_only:
            choice.finished = True
            return Piece(choice.index, "", (), [], "length", prompt=part.prompt, first=True)
        piece = self._piece(part, choice, delta)
        choice.started = True
        return piece

    def _note_first(self, part: Part, choice: Choice, delta: TokenDelta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[part.prompt] = delta.prompt_logprobs
        self.num_completion_tokens += choice.num_tokens  # what a resumed stream brought along
        self.queue_s = max(self.queue_s, delta.queue_s)
        if choice is next(iter(part.choices.values())):
            self.num_cached_tokens += delta.num_cached_tokens

    def _piece(self, part: Part, choice: Choice, delta: TokenDelta) -> Piece:
        decoder = choice.decoder
        before = decoder.num_tokens
        ends_hidden = delta.stop_token_id is not None and not self.job.include_stop
        if delta.logprobs is None:
            text = decoder.push(delta.token_ids, hidden_last=ends_hidden)
        else:
            text = self._push_with_logprobs(choice, delta, ends_hidden)
        num_new = decoder.num_tokens - before
        choice.num_tokens += num_new
        self.num_completion_tokens += num_new
        self.num_generated_tokens += num_new
        finish: FinishReason | None = delta.finish_reason
        stop_reason: int | str | None = None
        if decoder.stopped is not None:
            finish, stop_reason = "stop", decoder.stopped
            self._streams[part.request.request_id].abort(delta.choice_index)
        elif finish is not None:
            text += decoder.finish()
            if delta.stop_token_id is not None and delta.stop_token_id in part.request.sampling.stop_token_ids:
                stop_reason = self.job.stop_names.get(delta.stop_token_id, delta.stop_token_id)
        choice.finished = finish is not None
        return Piece(
            choice.index,
            text,
            delta.token_ids[:num_new],
            self._released_logprobs(choice) if self.job.want_logprobs else [],
            finish,
            stop_reason,
            part.prompt,
            not choice.started,
        )

    def _push_with_logprobs(self, choice: Choice, delta: TokenDelta, ends_hidden: bool) -> str:
        """Token by token, to know which characters each one brought."""
        decoder = choice.decoder
        text = ""
        for i, (token_id, logprobs) in enumerate(zip(delta.token_ids, delta.logprobs or (), strict=True)):
            start = decoder.position
            text += decoder.push((token_id,), hidden_last=ends_hidden and i == len(delta.token_ids) - 1)
            choice.held_logprobs.append((start, decoder.position, logprobs))
            self.sum_logprobs[choice.index] = self.sum_logprobs.get(choice.index, 0.0) + logprobs.logprob
            if decoder.stopped is not None:
                break
        return text

    def _released_logprobs(self, choice: Choice) -> list[tuple[int, TokenLogprobs]]:
        """Those whose text was handed out: a stop string that is not shown does not show up here either.

        With token ids in the answer they go with the ids instead, at once.
        """
        held, decoder = choice.held_logprobs, choice.decoder
        if self.job.return_token_ids or (choice.finished and decoder.cut is None):
            num_out = len(held)
        elif decoder.cut is not None:
            num_out = sum(1 for start, _, _ in held if start < decoder.cut)
        else:
            num_out = 0
            while num_out < len(held) and (held[num_out][0] < decoder.released or held[num_out][1] <= decoder.released):
                num_out += 1
        out = [(start, logprobs) for start, _, logprobs in held[:num_out]]
        choice.held_logprobs = [] if choice.finished else held[num_out:]
        return out


def _failure(part: Part, delta: TokenDelta) -> RequestRefused:
    """Why the engine gave a choice up, for the client."""
    if delta.finish_reason == "error":
        return GenerationFailed(f"This request could not be completed: {delta.error}.")
    if delta.finish_reason == "abort":
        return Unavailable("The request was aborted by the server.", retry_after_s=1.0)
    if part.request.deadline_s is not None:
        return DeadlineExceeded("deadline_ms: the first token was not there in time.", "deadline_ms")
    return QueueTimeout("The request waited for its first token as long as one may here.")

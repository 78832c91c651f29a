"""Turns a step's result into deltas: appends tokens, ends requests, makes filled blocks findable."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from orcaserve.engine.decode_batch import NO_DECODES, DecodeStep
from orcaserve.engine.draft import ChunkRow, StepRecord
from orcaserve.engine.ledger import Ledger
from orcaserve.engine.messages import StepResult, TokenDelta
from orcaserve.engine.outbox import Outbox
from orcaserve.engine.request import Request, State
from orcaserve.engine.stats import Counters


@dataclass(slots=True)
class Row:
    """One sampling row of a step and what came out of it."""

    request: Request
    slot: int
    token_ids: list[int]


class Applier:
    """A row whose request has ended since the step was planned is surplus and dropped; one whose request was
    preempted since is kept: its token is real, only its memory is gone."""

    def __init__(self, ledger: Ledger, outbox: Outbox, counters: Counters, lookahead: bool) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._counters = counters
        self._lookahead = lookahead  # rows advance by what was accepted, not by one

    def apply(self, record: StepRecord, result: StepResult) -> None:
        ids: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
        self._publish(record)
        if self._is_plain(record, result, ids):
            at = len(ids) - len(record.decodes.rows)
            if record.chunks:
                self._append_rows(record.chunks, NO_DECODES, result, ids[:at])
            for request in record.ends:
                self._append_last(request, record.decodes.rows, result, ids[at:])
            self._append_plain(record.decodes.rows, ids[at:])
        else:
            self._append_rows(record.chunks, record.decodes, result, ids)
        self._counters.num_steps += 1
        self._counters.num_drafted += result.num_drafted
        self._counters.num_accepted += result.num_accepted

    def _publish(self, record: StepRecord) -> None:
        """The step has been computed, so the blocks that it filled may be found."""
        for request, chunk in record.chunks:
            self._counters.prompt_tokens += chunk.num_tokens
            if request.state is State.RUNNING and request.group is not None:
                # What is held may have to compute its last token again, in a block that is still its own.
                request.group.kv.publish(request, chunk.start + chunk.num_tokens - request.held)
                request.land(chunk)
        if self._lookahead:
            return
        for request in record.decodes.filling:
            if request.state is State.RUNNING and request.group is not None:
                request.group.kv.publish(request, request.num_tokens)

    def _is_plain(self, record: StepRecord, result: StepResult, ids: list[int]) -> bool:
        """The decodes have one token each, with nothing beside it, and none that stops anybody."""
        return not (
            self._lookahead
            or result.num_tokens
            or result.logprobs
            or result.failed
            or not record.decodes.stop_ids.isdisjoint(ids)
        )

    def _append_last(self, request: Request, rows: list[Request], result: StepResult, ids: list[int]) -> None:
        if request.state is not State.FINISHED:
            self._append(Row(request, request.slot, [ids[rows.index(request)]]), result)

    def _append_plain(self, rows: list[Request], ids: list[int]) -> None:
        """Rows of finished requests are passed over."""
        finished = State.FINISHED
        num_finished = 0
        stream, deltas = -1, []
        for request, token in zip(rows, ids, strict=True):
            if request.state is finished:
                num_finished += 1
                continue
            request.token_ids.append(token)
            if request.stream != stream:
                stream = request.stream
                deltas = self._outbox.stream(stream)
            deltas.append(TokenDelta(request.request_id, request.choice_index, (token,)))
        self._counters.generation_tokens += len(rows) - num_finished

    def _append_rows(self, chunks: list[ChunkRow], decodes: DecodeStep, result: StepResult, ids: list[int]) -> None:
        for request, chunk in chunks:
            if request.state is State.FINISHED:
                continue
            if chunk.slot in result.failed:
                self._ledger.end(request, "error", result.failed[chunk.slot])
            elif request.state is State.RUNNING and (logprobs := result.prompt_logprobs.get(chunk.slot)):
                first = chunk.start + 1 if chunk.start else 0  # a token that is computed again is not told twice
                request.prompt_logprobs[first:] = logprobs
        for row in self._rows(chunks, decodes, result, ids):
            if row.request.state is State.FINISHED:
                continue
            if row.slot in result.failed:
                self._ledger.end(row.request, "error", result.failed[row.slot])
            elif row.token_ids:
                self._append(row, result)
            elif row.request.group is not None:
                row.request.group.compute_again(row.request)

    def _append(self, row: Row, result: StepResult) -> None:
        request = row.request
        num_before = request.num_tokens
        kept, reason, stop_token = request.take(row.token_ids)
        self._outbox.tokens(request, kept, reason, stop_token, result.logprobs.get(row.slot))
        self._counters.generation_tokens += len(kept)
        if self._lookahead and request.state is State.RUNNING and request.group is not None:
            # The last token's own KV is not there yet.
            request.group.kv.publish(request, max(num_before, request.num_tokens - 1))
        if reason is not None:
            self._ledger.close(request, reason)
        elif request.held and request.group is not None:
            request.group.start_decoding(request)

    @staticmethod
    def _rows(chunks: list[ChunkRow], decodes: DecodeStep, result: StepResult, ids: list[int]) -> list[Row]:
        """The result's rows: the chunks that sample, in order, then the decodes in order."""
        requests = [request for request, chunk in chunks if chunk.samples]
        slots = [chunk.slot for _, chunk in chunks if chunk.samples]
        requests += decodes.rows
        slots += np.frombuffer(decodes.slots, np.int32).tolist()
        counts = np.frombuffer(result.num_tokens, np.int32).tolist() if result.num_tokens else [1] * len(requests)
        assert len(counts) == len(requests), f"{len(requests)} rows, {len(counts)} in the result"
        assert sum(counts) == len(ids), f"rows have {sum(counts)} tokens, {len(ids)} came"
        ends = list(accumulate(counts))
        return [
            Row(request, slot, ids[end - count : end])
            for request, slot, end, count in zip(requests, slots, ends, counts, strict=True)
        ]

"""Pieces of text become the bytes of the answer: OpenAI's objects, whole or as server-sent events.

A chunk is put together from ready-made bytes around its JSON string: that is 2 us a token, where building, checking
and dumping a model object takes 40.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from orcaserve.cluster.app_job import Piece
from orcaserve.cluster.app_logprobs import LogprobWriter
from orcaserve.cluster.app_run import Run
from orcaserve.cluster.errors import error_body
from orcaserve.cluster.text import TextCodec
from orcaserve.engine.errors import RequestRefused
from orcaserve.engine.messages import FinishReason, TokenLogprobs

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def error_event(refused: RequestRefused) -> bytes:
    """What ends a stream that cannot go on. No finish reason and no [DONE] follow it."""
    return b"event: error\ndata: " + _encode(error_body(refused)) + b"\n\n"


def usage_of(run: Run) -> dict[str, Any]:
    """OpenAI's usage object; prompt tokens count once, whatever n is."""
    return {
        "prompt_tokens": run.num_prompt_tokens,
        "completion_tokens": run.num_completion_tokens,
        "total_tokens": run.num_prompt_tokens + run.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": run.num_cached_tokens},
    }


class StreamWriter:
    """Server-sent events of one job."""

    def __init__(self, run: Run, codec: TextCodec) -> None:
        job = run.job
        self._run = run
        self._job = job
        self._logprobs = LogprobWriter(codec, job.num_top_logprobs, job.tokens_as_ids)
        self._is_chat = job.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {"id": job.id, "object": kind, "created": job.created, "model": job.model, "system_fingerprint": None}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"
        # A choice that adds text and nothing else, which nearly all do.
        opening = b'{"index":%d,"delta":{"content":' if self._is_chat else b'{"index":%d,"text":'
        self._plain_head = [self._head + opening % index for index in range(job.num_per_prompt * len(job.prompts))]
        closing = (
            b'},"logprobs":null,"finish_reason":null}' if self._is_chat else b',"logprobs":null,"finish_reason":null}'
        )
        self._plain_tail = closing + self._tail
        self._is_plain = not (job.want_logprobs or job.return_token_ids or job.continuous_usage)

    def piece(self, piece: Piece) -> bytes:
        """Its chunks: none, one or (for the first and the last of a choice) several."""
        text = piece.text
        if self._is_plain and not piece.first and piece.finish_reason is None:
            return self._plain_head[piece.index] + _encode(text) + self._plain_tail if text else b""
        out = b""
        echo = ""
        prompt_logprobs: list[TokenLogprobs | None] = []
        if piece.first:
            if self._is_chat:
                out += self._opening_chunk(piece)
            elif self._job.echo is not None:
                echo = self._job.echo[piece.prompt]
                prompt_logprobs = self._run.prompt_logprobs.get(piece.prompt, [])
        shows_ids = self._job.return_token_ids and (piece.token_ids or piece.first)
        if text or echo or piece.logprobs or shows_ids or prompt_logprobs:
            out += self._chunk(self._content(piece, echo + text, prompt_logprobs))
        if piece.finish_reason is not None:
            out += self._chunk(self._ending(piece))
        return out

    def closing(self) -> bytes:
        """The usage chunk, where it was asked for, and the end mark."""
        if not self._job.include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage_of(self._run)) + b"}\n\n" + DONE

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        tail = self._tail
        if self._job.continuous_usage:
            tail = b'],"usage":' + _encode(usage_of(self._run)) + b"}\n\n"
        if extra:
            tail = (
                b"]," + _encode(extra)[1:-1] + b"," + tail[2:]
                if tail[1:2] == b","
                else b"]," + _encode(extra)[1:] + b"\n\n"
            )
        return self._head + _encode(choice) + tail

    def _opening_chunk(self, piece: Piece) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra = {"prompt_token_ids": self._job.prompts[piece.prompt]} if self._job.return_token_ids else None
        return self._chunk(choice, extra)

    def _content(self, piece: Piece, text: str, prompt_logprobs: list[TokenLogprobs | None]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._job.want_logprobs and (piece.logprobs or prompt_logprobs):
            prompt_ids = self._job.prompts[piece.prompt]
            if self._is_chat:
                logprobs = self._logprobs.chat(piece.logprobs)
            else:
                logprobs = self._logprobs.completion(
                    piece.logprobs, prompt_logprobs, prompt_ids if prompt_logprobs else ()
                )
        content: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        choice = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": None}
        if self._job.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.first and not self._is_chat:
                choice["prompt_token_ids"] = self._job.prompts[piece.prompt]
        return choice

    def _ending(self, piece: Piece) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        choice = {"index": piece.index, **content, "logprobs": None, "finish_reason": piece.finish_reason}
        return choice if piece.stop_reason is None else choice | {"stop_reason": piece.stop_reason}


@dataclass(slots=True)
class _Whole:
    """A choice, collected."""

    prompt: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class AnswerWriter:
    """The whole answer of one job, as one JSON object."""

    def __init__(self, run: Run, codec: TextCodec) -> None:
        self._run = run
        self._job = run.job
        self._logprobs = LogprobWriter(codec, self._job.num_top_logprobs, self._job.tokens_as_ids)
        self._wholes: dict[int, _Whole] = {}

    def piece(self, piece: Piece) -> None:
        """One more."""
        whole = self._wholes.setdefault(piece.index, _Whole(piece.prompt))
        whole.texts.append(piece.text)
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason = piece.finish_reason
        whole.stop_reason = piece.stop_reason

    def body(self) -> bytes:
        """After the last piece."""
        job = self._job
        choice_of = self._chat_choice if job.kind == "chat" else self._completion_choice
        answer: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion" if job.kind == "chat" else "text_completion",
            "created": job.created,
            "model": job.model,
            "choices": [choice_of(index, whole) for index, whole in self._chosen()],
            "usage": usage_of(self._run),
            "system_fingerprint": None,
        }
        if job.kind == "chat":
            if job.want_prompt_logprobs:
                answer["prompt_logprobs"] = self._logprobs.prompt(self._run.prompt_logprobs.get(0, []))
            if job.return_token_ids:
                answer["prompt_token_ids"] = job.prompts[0]
        return _encode(answer)

    def _chosen(self) -> list[tuple[int, _Whole]]:
        """All choices in order; with best_of the n most likely ones of each prompt, by log-probability a token."""
        job = self._job
        if job.num_per_prompt == job.n:
            return sorted(self._wholes.items())

        def likelihood(index: int) -> float:
            return self._run.sum_logprobs.get(index, 0.0) / max(1, len(self._wholes[index].token_ids))

        chosen: list[tuple[int, _Whole]] = []
        for prompt in range(len(job.prompts)):
            first = prompt * job.num_per_prompt
            ranked = sorted(range(first, first + job.num_per_prompt), key=likelihood, reverse=True)
            chosen += [(prompt * job.n + place, self._wholes[index]) for place, index in enumerate(ranked[: job.n])]
        return chosen

    def _chat_choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(whole.texts), "refusal": None}
        logprobs = self._logprobs.chat(whole.logprobs) if self._job.want_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs} | self._ending(whole)

    def _completion_choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        job = self._job
        echo = job.echo[whole.prompt] if job.echo is not None else ""
        prompt_logprobs = self._run.prompt_logprobs.get(whole.prompt, [])
        logprobs = None
        if job.want_logprobs:
            shown = prompt_logprobs if job.echo is not None else []
            logprobs = self._logprobs.completion(whole.logprobs, shown, job.prompts[whole.prompt] if shown else ())
        choice = {"index": index, "text": echo + "".join(whole.texts), "logprobs": logprobs} | self._ending(whole)
        if job.want_prompt_logprobs:
            choice["prompt_logprobs"] = self._logprobs.prompt(prompt_logprobs)
        if job.return_token_ids:
            choice["prompt_token_ids"] = job.prompts[whole.prompt]
        return choice

    def _ending(self, whole: _Whole) -> dict[str, Any]:
        ending: dict[str, Any] = {"finish_reason": whole.finish_reason, "stop_reason": whole.stop_reason}
        return ending | {"token_ids": whole.token_ids} if self._job.return_token_ids else ending

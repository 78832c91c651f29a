"""Log-probabilities as OpenAI's two endpoints spell them. JSON knows neither -inf nor NaN: both become -9999."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orcaserve.cluster.text import TextCodec
from orcaserve.engine.messages import TokenLogprobs

_LOWEST = -9999.0


class LogprobWriter:
    """For one request: how tokens are named, and how many of the best ones are listed."""

    def __init__(self, codec: TextCodec, num_top: int, tokens_as_ids: bool) -> None:
        self._codec = codec
        self._num_top = num_top
        self._tokens_as_ids = tokens_as_ids

    def chat(self, entries: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        return {"content": [self._chat_entry(logprobs) for _, logprobs in entries], "refusal": None}

    def completion(
        self,
        entries: Sequence[tuple[int, TokenLogprobs]],
        prompt: Sequence[TokenLogprobs | None],
        prompt_ids: Sequence[int],
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice: the echoed prompt's (null for its first token), then the output's."""
        tokens, values, tops, offsets = [], [], [], []
        offset = 0
        for token_id, known in zip(prompt_ids, prompt, strict=bool(prompt)):
            text = self._name(token_id)
            tokens.append(text)
            offsets.append(offset)
            values.append(None if known is None else _finite(known.logprob))
            tops.append(None if known is None else self._top(known))
            offset += len(self._codec.token_text(token_id)[0])
        for start, logprobs in entries:
            tokens.append(self._name(logprobs.token_id))
            offsets.append(offset + start)
            values.append(_finite(logprobs.logprob))
            tops.append(self._top(logprobs))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`, as vLLM spells it."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        listed = {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._name(token_id)}
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        own = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": self._name(entry.token_id)}
        return {str(entry.token_id): own} | listed

    def _chat_entry(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        best = [self._token(token_id, logprob) for token_id, logprob in logprobs.top[: self._num_top]]
        return self._token(logprobs.token_id, logprobs.logprob) | {"top_logprobs": best}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_text(token_id)[1]
        return {"token": self._name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        best = {self._name(token_id): _finite(logprob) for token_id, logprob in logprobs.top[: self._num_top]}
        return best | {self._name(logprobs.token_id): _finite(logprobs.logprob)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokens_as_ids else self._codec.token_text(token_id)[0]


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST  # also for NaN, which compares as false

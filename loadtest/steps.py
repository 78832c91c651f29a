"""What each model step did and how long it took: what the study prints, and the step-time model learns from."""

from __future__ import annotations

import msgspec


class StepLog(msgspec.Struct):
    """Columns, one entry a step."""

    start_s: list[float] = []
    seconds: list[float] = []
    prefill_tokens: list[int] = []  # real ones
    decode_tokens: list[int] = []
    padding_tokens: list[int] = []  # computed for nobody
    requests: list[int] = []  # slots in the step
    context_tokens: list[int] = []  # KV entries read: sum over slots of their context
    prefill_pairs: list[int] = []  # query-key pairs of the prefill chunks (each token with all before it)

    def add(
        self,
        start_s: float,
        seconds: float,
        prefill: int,
        decode: int,
        padding: int,
        requests: int,
        context: int,
        pairs: int,
    ) -> None:
        self.start_s.append(start_s)
        self.seconds.append(seconds)
        self.prefill_tokens.append(prefill)
        self.decode_tokens.append(decode)
        self.padding_tokens.append(padding)
        self.requests.append(requests)
        self.context_tokens.append(context)
        self.prefill_pairs.append(pairs)

    def __len__(self) -> int:
        return len(self.seconds)

"""What each model step did and how long it took: what the study prints, and the step-time model learns from."""

from __future__ import annotations

import msgspec


class StepWork(msgspec.Struct):
    """What one step computed, summed over its slots, and how long it took."""

    seconds: float
    prefill_tokens: int  # real ones
    decode_tokens: int
    padding_tokens: int  # computed for nobody
    rows: int  # sampled
    kv_tokens: int  # KV entries that attention reads: the contexts, padding included
    prefill_pairs: int  # query-key pairs of the prefill chunks: each token with all up to itself

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens + self.padding_tokens


class StepLog(msgspec.Struct):
    """Columns, one entry a step."""

    start_s: list[float] = []
    seconds: list[float] = []
    prefill_tokens: list[int] = []
    decode_tokens: list[int] = []
    padding_tokens: list[int] = []
    rows: list[int] = []
    kv_tokens: list[int] = []
    prefill_pairs: list[int] = []

    def add(self, start_s: float, work: StepWork) -> None:
        self.start_s.append(start_s)
        for name in StepWork.__struct_fields__:
            getattr(self, name).append(getattr(work, name))

    def __len__(self) -> int:
        return len(self.seconds)

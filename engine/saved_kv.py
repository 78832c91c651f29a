"""KV blocks that outlived their group: their content can be copied by groups on the same host."""

from __future__ import annotations

from typing import NamedTuple


class SavedKv(NamedTuple):
    """Where a lost group's pool holds the KV of a request's first `num_tokens` tokens."""

    group_id: int
    blocks: list[int]  # as many as they fill, the last one perhaps in part
    num_tokens: int

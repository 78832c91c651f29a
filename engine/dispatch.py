"""Which group gets a request: a pure function of what each group could do for it now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class GroupLoad(NamedTuple):
    """One group as one request sees it. Tokens stand for time: the groups of a deployment are alike."""

    group_id: int
    can_start: bool  # with its next plan: a slot, memory for the whole prompt, not draining, not stuck
    num_found_tokens: int  # of this request, by exact prefix match or in what a lost group has left
    work_ahead_tokens: int  # of requests that it runs: steps in flight, prompts to finish, one for each decode


def choose_group(num_tokens: int, groups: Iterable[GroupLoad], asking: int) -> int | None:
    """The group that would have the request's first token soonest, or None if none can start it.

    It has to compute what it does not hold of the `num_tokens`, after what it owes already. A tie goes to the group
    that asks, since it is ready now; then to the one with less work, then to the lower id.
    """
    best: tuple[int, bool, int, int] | None = None
    for load in groups:
        if load.can_start:
            cost = num_tokens - load.num_found_tokens + load.work_ahead_tokens
            key = (cost, load.group_id != asking, load.work_ahead_tokens, load.group_id)
            if best is None or key < best:
                best = key
    return None if best is None else best[3]

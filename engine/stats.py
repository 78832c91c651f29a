"""Figures for metrics, autoscaling and the console: frozen, and cheap enough to ask for every second."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class Counters:
    """What only grows."""

    num_preemptions: int = 0
    num_migrations: int = 0  # requests that lost their group and went on
    num_imported_blocks: int = 0  # that they took along from its pool
    prefix_cache_queries: int = 0  # tokens of requests that were started
    prefix_cache_hits: int = 0  # those of them that were found
    prompt_tokens: int = 0  # computed, again after a preemption included
    generation_tokens: int = 0  # handed out
    padding_tokens: int = 0  # computed for nobody (static batching only)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class GroupStats(msgspec.Struct, frozen=True):
    """One group's share. A block is used, cached (free, but its content can be found), or free and blank."""

    group_id: int
    running: int
    num_slots: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int  # cached ones included
    owed_tokens: int  # steps in flight, prompts to finish, and one for each decode
    steps_in_flight: int
    step_s: float  # from plan to result, smoothed
    draining: bool


class SchedulerStats(msgspec.Struct, frozen=True):
    """One moment. Counts are of choices: a request with n = 3 counts once while it waits, three times when it runs."""

    running: int
    waiting: int
    waiting_tokens: int
    waiting_by_tenant: dict[str, int]
    groups: list[GroupStats]
    num_preemptions: int
    num_migrations: int
    num_imported_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    padding_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    finished: dict[str, int]  # by reason
    tokens_per_s: float  # computed lately, all groups together

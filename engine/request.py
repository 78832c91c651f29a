"""One choice of one request while the scheduler knows it: mutable, and never sent anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import Chunk, FinishReason, GenerateRequest, NewSlot, TokenLogprobs
from orcaserve.engine.prefix import PrefixKeys, root_key
from orcaserve.engine.saved_kv import SavedKv

if TYPE_CHECKING:
    from orcaserve.engine.group import Group

import numpy as np


class State(IntEnum):
    """Where a request is. FORKING: it holds its parent's prompt blocks and takes a slot with the group's next plan."""

    WAITING = 0
    FORKING = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """A request owes the tokens that it knows and has not computed; there are no phases.

    `num_computed` counts what has been planned, steps in flight included. A decoding request is advanced by its
    DecodeBatch without being touched, so there `num_computed` stands still and `token_ids` says how far it is.
    """

    __slots__ = (
        "arrival_s",
        "awaits_group",
        "awaits_step",
        "blocks",
        "bucket",
        "choice_index",
        "deadline_s",
        "end_tick",
        "ending",
        "group",
        "held",
        "keys",
        "max_len",
        "num_at_last_loss",
        "num_cached_tokens",
        "num_computed",
        "num_group_losses",
        "num_landed",
        "num_passes",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "priority",
        "prompt_logprobs",
        "queue_s",
        "queued_tokens",
        "reported",
        "request_id",
        "row",
        "sampling",
        "saved_kv",
        "sequence",
        "siblings",
        "slot",
        "state",
        "stops",
        "stream",
        "tenant",
        "token_ids",
    )

    def __init__(
        self, request: GenerateRequest, choice: int, sequence: int, arrival_s: float, config: SchedulerConfig
    ) -> None:
        sampling = request.sampling
        resumed = bool(request.output_token_ids)
        if sampling.prompt_logprobs is not None and (resumed or choice > 0):
            # They went out once: with the first token, of the first choice.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.request_id = request.request_id
        self.choice_index = request.choice_index + choice
        self.stream = request.stream
        self.tenant = request.tenant
        self.priority = request.priority
        self.deadline_s = request.deadline_s
        self.sampling = sampling
        self.sequence = sequence  # order of arrival; streams of a lost group share theirs out anew
        self.arrival_s = arrival_s
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.max_len = min(self.num_prompt_tokens + sampling.max_tokens, config.max_model_len)
        eos = () if sampling.ignore_eos else config.eos_token_ids
        self.stops = frozenset((*eos, *sampling.stop_token_ids))
        self.keys = PrefixKeys(root_key(request.tenant, request.cache_salt), config.block_size)
        self.siblings: list[Request] = []  # choices that have not forked off yet

        self.state = State.WAITING
        self.group: Group | None = None
        self.slot = -1
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_published = 0  # leading full blocks that are known to the prefix cache
        self.num_landed = 0  # tokens that chunks have really computed here; max_len once the prompt's last one has
        self.saved_kv: SavedKv | None = None  # of a group that was lost, until a chunk has landed in another one
        self.ending = False  # the step that samples its last token is planned
        self.held = False  # the step that samples its first token here is planned, and may come back without one
        self.row = -1  # in the decode batch; -1: not in it
        self.bucket = -1
        self.end_tick = -1
        self.awaits_group = -1  # preempted while a step of this group was in flight:
        self.awaits_step = -1  # its token belongs to the request, which can start again only after that

        self.queued_tokens = 0
        self.num_passes = 0  # how often a ready group left it to a better one
        self.num_preemptions = 0
        self.num_group_losses = request.num_group_losses
        self.num_at_last_loss = len(self.token_ids) if request.num_group_losses else -1
        self.num_cached_tokens = 0
        self.queue_s = -1.0  # -1: never started
        self.reported = resumed  # the first delta has gone out
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.reported

    @property
    def num_with_kv(self) -> int:
        """Tokens whose KV lies in its blocks whatever becomes of the steps in flight."""
        return min(self.num_landed, self.num_tokens - 1)

    def land(self, chunk: Chunk) -> None:
        """A step with this chunk has been computed."""
        self.num_landed = self.max_len if chunk.samples else chunk.start + chunk.num_tokens
        self.saved_kv = None

    def as_new_slot(self) -> NewSlot:
        """What a worker must know; prompt logprobs are asked for until they have gone out."""
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and self.reported:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        ids = np.array(self.token_ids, np.int32).tobytes()
        return NewSlot(self.slot, ids, self.num_prompt_tokens, sampling, self.choice_index, self.keys.root)

    def take(self, sampled: Iterable[int]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Append sampled ids up to the end of the request: (those kept, why it ended, the token that stopped it).

        A stop counts before the length: a run of accepted ids is cut at its first stop token. Before `min_tokens`
        workers sample none, except where the grammar leaves nothing else: then it is the end.
        """
        fewest = self.sampling.min_tokens
        kept: list[int] = []
        for token in sampled:
            self.token_ids.append(token)
            kept.append(token)
            if token in self.stops and (self.num_output_tokens >= fewest or self.sampling.grammar is not None):
                return tuple(kept), "stop", token
            if len(self.token_ids) >= self.max_len:
                return tuple(kept), "length", None
        return tuple(kept), None, None

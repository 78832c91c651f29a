"""What the scheduler knows of one group: its memory, its slots, its running requests, its steps in flight."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.decode_batch import DecodeBatch
from orcaserve.engine.draft import StepRecord
from orcaserve.engine.kv_manager import KVManager
from orcaserve.engine.prefix_homes import PrefixHomes
from orcaserve.engine.request import Request, State
from orcaserve.engine.saved_kv import SavedKv

STUCK_AFTER_STEPS = 8.0  # a step in flight for this many usual steps,
STUCK_AFTER_S = 1.0  # and for this long: nothing new is left to this group until it moves


class Group:
    """State and its small moves; decisions are the planner's.

    A slot is a promise of one token in every step, so there are never more slots than the token budget.
    """

    def __init__(self, group_id: int, num_blocks: int, config: SchedulerConfig, homes: PrefixHomes) -> None:
        self.group_id = group_id
        self.num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv = KVManager(
            num_blocks,
            config.block_size,
            config.watermark,
            config.enable_prefix_caching,
            lambda key: homes.add(key, group_id),
        )
        self.decodes = DecodeBatch(self.num_slots, config.block_size)
        self._rows = self.decodes.rows  # the list itself: dispatch counts the rows of every group for every request
        self.running: dict[Request, None] = {}  # those with a slot
        self.prefills: list[Request] = []  # running, and some of the prompt is not planned yet
        self.forks: list[Request] = []  # siblings that take a slot with the next plan
        self.freed_slots: list[int] = []  # the workers have not been told yet
        self.in_flight: deque[StepRecord] = deque()
        self.tokens_in_flight = 0
        self.readable: set[int] = set()  # groups whose pool the workers here can read, also after their loss
        self.draining = False
        self.paused_decodes = False  # the last step was a whole prompt's alone
        self.num_ending = 0  # running requests that only wait for the result of their last token
        self.num_steps = 0
        self.step_s = 0.0  # time from plan to result, smoothed
        self._free_slots = list(range(self.num_slots))
        self._progress_s = 0.0

    @property
    def num_blocks(self) -> int:
        return self.kv.pool.num_blocks

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.forks)

    @property
    def owed_tokens(self) -> int:
        """Work ahead of a newcomer: steps in flight, prompts to finish, and a token for each decode."""
        owed = self.tokens_in_flight + len(self._rows)
        for request in self.prefills:
            owed += request.num_tokens - request.num_computed
        return owed

    def is_stuck(self, now_s: float) -> bool:
        if not self.in_flight:
            return False
        waited = now_s - max(self.in_flight[0].planned_s, self._progress_s)
        return waited > max(STUCK_AFTER_S, STUCK_AFTER_STEPS * self.step_s)

    def saved_for(self, request: Request) -> SavedKv | None:
        """What a lost group has left of it, if that can be read here."""
        saved = request.saved_kv
        return saved if saved is not None and saved.group_id in self.readable else None

    def save(self, request: Request) -> SavedKv | None:
        """What will be left of a request that runs here when this group is lost."""
        if request.wants_prompt_logprobs:
            return None
        num_tokens = request.num_with_kv
        return SavedKv(self.group_id, request.blocks[: self.kv.num_blocks_for(num_tokens)], num_tokens)

    def num_found(self, request: Request, matched: list[int]) -> int:
        """Leading tokens that need not be computed here, given the blocks that were matched just now."""
        num_cached = len(matched) * self.kv.block_size
        saved = self.saved_for(request)
        return num_cached if saved is None else max(num_cached, saved.num_tokens)

    def seat(self, request: Request) -> None:
        """Give it a slot: the lowest free one, so that the rows in use stay dense."""
        request.slot = heappop(self._free_slots)
        request.group = self
        request.state = State.RUNNING
        self.running[request] = None

    def unseat(self, request: Request) -> None:
        """Take back slot and blocks at once: plans run in order, so the next user comes after its last step."""
        if request.state is State.FORKING:
            self.forks.remove(request)
        else:
            del self.running[request]
            if request.row >= 0:
                self.decodes.leave(request)
            elif request.ending:
                self.num_ending -= 1
            elif request in self.prefills:
                self.prefills.remove(request)
            heappush(self._free_slots, request.slot)
            self.freed_slots.append(request.slot)
        self.kv.release(request)
        request.slot = -1
        request.ending = request.held = False
        request.group = None

    def mark_ending(self, request: Request) -> None:
        """Its last token is on its way; nothing more is planned for it. It has left the decode batch."""
        request.ending = True
        self.num_ending += 1

    def compute_again(self, request: Request) -> None:
        """It was to be sampled and was not, so it owes the last token that it knows."""
        request.held = False
        request.num_computed = request.num_tokens - 1
        self.prefills.append(request)

    def start_decoding(self, request: Request) -> None:
        """Its first token here is known."""
        request.held = False
        self.kv.publish(request, request.num_tokens - 1)
        self.decodes.join(request, request.num_tokens - 1)

    def num_sampling(self, request: Request) -> int:
        """Steps in flight that sample a token for it."""
        return sum(
            request in record.decodes.rows or any(r is request and c.samples for r, c in record.chunks)
            for record in self.in_flight
        )

    def launch(self, record: StepRecord) -> None:
        self.in_flight.append(record)
        self.tokens_in_flight += record.num_tokens
        self.num_steps += 1

    def land(self, step_id: int, now_s: float) -> StepRecord | None:
        """The record of the oldest step in flight; None for a result from before the group was lost."""
        if not self.in_flight or step_id < self.in_flight[0].step_id:
            return None
        record = self.in_flight.popleft()
        self.tokens_in_flight -= record.num_tokens
        assert record.step_id == step_id, f"result of step {step_id} before that of step {record.step_id}"
        self.time_step(record.planned_s, now_s)
        return record

    def time_step(self, planned_s: float, now_s: float) -> None:
        took = now_s - max(planned_s, self._progress_s)
        self.step_s += 0.2 * (took - self.step_s) if self.step_s else took
        self._progress_s = now_s

    def check_invariants(self) -> None:
        self.kv.pool.check_invariants()
        self.decodes.check_invariants()
        slots = [request.slot for request in self.running]
        assert len(set(slots)) == len(slots), "two requests in one slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "slots do not add up"
        refs = [0] * self.kv.pool.num_blocks
        for request in [*self.running, *self.forks]:
            assert request.group is self, f"{request.request_id} runs here but believes to be elsewhere"
            for block in request.blocks:
                refs[block] += 1
            reach = len(request.blocks) * self.kv.block_size
            assert request.num_computed <= min(reach, request.num_tokens), f"{request.request_id} computed past its end"
            assert request.num_published <= len(request.blocks)
        for block, count in enumerate(refs):
            assert self.kv.pool.ref_count(block) == count, f"block {block}: {count} users, another count in the pool"
        for request in self.running:
            assert request.state is State.RUNNING
            places = (request.row >= 0) + request.ending + request.held + (request in self.prefills)
            assert places == 1, f"{request.request_id} is in {places} of: decodes, ending, held, prefills"
            self._check_writable(request)
        for request in self.forks:
            assert request.state is State.FORKING
        assert self.num_ending == sum(request.ending for request in self.running)

    def _check_writable(self, request: Request) -> None:
        """Copy on write: no block that it may write from here on has a second user, forks about to split apart."""
        first = request.num_computed // self.kv.block_size if request in self.prefills else None
        if first is None:
            first = (request.num_tokens - request.held) // self.kv.block_size
        waiting = {block for fork in self.forks for block in fork.blocks[-1:]}
        for block in request.blocks[first:]:
            if block not in waiting:
                assert self.kv.pool.ref_count(block) == 1, f"block {block} is shared and may be written"

"""Plans one step of one group: running requests first, oldest first, then those that wait."""

from __future__ import annotations

from orcaserve.engine.admission import MAX_LOOKAHEAD, MAX_PREEMPTIONS, Admission, Verdict
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.draft import PlanDraft
from orcaserve.engine.group import Group
from orcaserve.engine.ledger import Ledger
from orcaserve.engine.messages import StepPlan
from orcaserve.engine.policy import WaitingQueue
from orcaserve.engine.request import Request, State
from orcaserve.engine.stats import Counters


class Planner:
    """One notion: a request owes the tokens that it knows and has not computed; a step hands out the token budget."""

    def __init__(
        self, config: SchedulerConfig, queue: WaitingQueue, admission: Admission, ledger: Ledger, counters: Counters
    ) -> None:
        self._config = config
        self._queue = queue
        self._admission = admission
        self._ledger = ledger
        self._counters = counters
        self._speculates = config.num_speculative_tokens > 0
        # A rejected draft changes where a row goes on, so a step is planned only once the one before it is known.
        self.max_in_flight = 1 if self._speculates else config.max_steps_in_flight
        self._chunk_cap = config.long_prefill_token_threshold or config.max_num_batched_tokens
        if not config.enable_chunked_prefill:
            self._chunk_cap = config.max_num_batched_tokens
        self._next_step_id = 0

    def plan(self, group: Group, now_s: float) -> StepPlan | None:
        if len(group.in_flight) >= self.max_in_flight:
            return None
        draft = PlanDraft(self._config.max_num_batched_tokens)
        if not self._whole_prompt_first(group, draft, now_s) and not self._continue_decodes(group, draft):
            return None
        if group.forks:
            self._fork(group, draft)
        if group.prefills:
            self._continue_prefills(group, draft)
        if len(self._queue) and not draft.preempted and not group.draining:
            self._admit(group, draft, now_s)
        if draft.empty:
            return None
        return self._launch(group, draft, now_s)

    def take_step_ids(self, count: int) -> int:
        """The first of so many new ones."""
        first = self._next_step_id
        self._next_step_id += count
        return first

    def _launch(self, group: Group, draft: PlanDraft, now_s: float) -> StepPlan:
        step_id = self.take_step_ids(1)
        record = draft.record(step_id, now_s)
        for request in draft.decodes.ending:
            group.mark_ending(request)
        for request, chunk in draft.chunks:
            if chunk.samples:
                self._prompt_is_planned(group, request, record.ends)
        freed, group.freed_slots = group.freed_slots, []
        group.launch(record)
        return draft.plan(step_id, freed)

    def _prompt_is_planned(self, group: Group, request: Request, ends: list[Request]) -> None:
        """Its last chunk is in the plan: from the next one on it decodes, or once its grammar has let it begin."""
        for sibling in request.siblings:
            group.kv.share_prompt(request, sibling)
            sibling.state = State.FORKING
            sibling.group = group
            sibling.num_cached_tokens = request.num_cached_tokens
            sibling.queue_s = request.queue_s
            group.forks.append(sibling)
        request.siblings = []
        if request.sampling.grammar is not None:
            request.held = True
        elif request.num_tokens + 1 >= request.max_len:
            group.mark_ending(request)
            ends.append(request)
        else:
            group.decodes.join(request, request.num_tokens)

    # Running requests

    def _continue_decodes(self, group: Group, draft: PlanDraft) -> bool:
        """One token for every decode; False if planning waits for blocks that a step in flight will bring back."""
        if self._speculates:
            return self._continue_speculating(group, draft)
        if not self._make_room(group, draft, group.decodes.needing_block()):
            return False
        for request in group.decodes.needing_block():
            draft.add_block(request.slot, group.kv.append_block(request))
        self._queue.charge_step(group.decodes.rows_by_tenant)
        draft.add_decodes(group.decodes.step())
        return True

    def _continue_speculating(self, group: Group, draft: PlanDraft) -> bool:
        """As above, for rows that stand anywhere, each with room for drafts as far as memory allows."""
        kv, rows = group.kv, group.decodes.rows
        needing = {r: None for r in rows if kv.num_blocks_for(r.num_tokens) > len(r.blocks)}
        if not self._make_room(group, draft, needing):
            return False
        for request in needing:
            if request.row >= 0:
                draft.add_block(request.slot, kv.append_block(request))
        num_draft_tokens = self._draft_tokens(group)
        for request in rows:
            reach = min(request.num_tokens + num_draft_tokens, request.max_len - 1)
            while kv.num_blocks_for(reach) > len(request.blocks) and kv.pool.num_free > kv.watermark_blocks:
                draft.add_block(request.slot, kv.append_block(request))
        self._queue.charge_step(group.decodes.rows_by_tenant)
        draft.add_decodes(group.decodes.step_speculating(), num_draft_tokens)
        return True

    def _draft_tokens(self, group: Group) -> int:
        """Drafts may take what prompts do not need: half the budget is theirs while any prompt waits to be computed."""
        rows = len(group.decodes)
        if not rows:
            return 0
        budget = self._config.max_num_batched_tokens
        if group.prefills or len(self._queue):
            budget //= 2
        return max(0, min(self._config.num_speculative_tokens, budget // rows - 1))

    def _continue_prefills(self, group: Group, draft: PlanDraft) -> None:
        if len(group.prefills) > 1:
            group.prefills.sort(key=self._queue.rank)
        unfinished = []
        for request in group.prefills:
            if draft.budget_left and self._add_chunk(request, draft):
                continue
            unfinished.append(request)
        group.prefills = unfinished

    def _add_chunk(self, request: Request, draft: PlanDraft) -> bool:
        owed = request.num_tokens - request.num_computed
        num_tokens = min(owed, draft.budget_left, self._chunk_cap)
        self._queue.charge(request.tenant, num_tokens)
        return draft.add_chunk(request, num_tokens)

    def _fork(self, group: Group, draft: PlanDraft) -> None:
        """Siblings of a prompt planned in the step before take their own slots, or queue up on their own."""
        forks, group.forks = group.forks, []
        for sibling in forks:
            if group.has_free_slot and draft.budget_left and group.kv.pool.num_free > group.kv.watermark_blocks:
                copy = group.kv.split_last(sibling)
                group.seat(sibling)
                draft.add_slot(sibling, copy)
                draft.add_chunk(sibling, 1)
            else:
                self._requeue_fork(group, sibling)

    def _requeue_fork(self, group: Group, sibling: Request) -> None:
        group.kv.release(sibling)
        sibling.group = None
        sibling.state = State.WAITING
        self._queue.push(sibling)

    # Memory

    def _make_room(self, group: Group, draft: PlanDraft, needing: dict[Request, None]) -> bool:
        """See to it that each of `needing` can have a block, at the expense of the last in rank.

        False: nothing is preempted, because a step in flight ends requests whose blocks will do.
        """
        pool = group.kv.pool
        while len(needing) > pool.num_free:
            if group.num_ending and group.in_flight:
                return False
            if group.forks:
                self._requeue_fork(group, group.forks.pop())
                continue
            victims = [request for request in group.running if not request.ending]
            victim = max(victims, key=self._victim_rank)
            needing_now = victim in needing
            if len(victims) == 1:
                self._end_for_want_of_memory(group, victim)
            else:
                self._preempt(group, victim)
                draft.preempted = True
            if needing_now:
                needing.pop(victim, None)
        return True

    def _victim_rank(self, request: Request) -> tuple[bool, tuple[float, int]]:
        """The last in the queue's order has normally computed the least, and the oldest always gets on."""
        return request.num_preemptions < MAX_PREEMPTIONS, self._queue.rank(request)

    def _preempt(self, group: Group, victim: Request) -> None:
        """Back to its place in the queue; a token that a step in flight samples for it still counts."""
        if group.in_flight:
            victim.awaits_group = group.group_id
            victim.awaits_step = group.in_flight[-1].step_id
        group.unseat(victim)
        victim.state = State.WAITING
        victim.num_preemptions += 1
        victim.prompt_logprobs = []
        self._queue.push(victim)
        self._counters.num_preemptions += 1

    def _end_for_want_of_memory(self, group: Group, request: Request) -> None:
        """It has the whole pool to itself and needs more: that is its length."""
        if sampling := group.num_sampling(request):
            request.max_len = request.num_tokens + sampling
            group.decodes.leave(request)
            group.mark_ending(request)
            group.in_flight[-1].ends.append(request)
        else:
            self._ledger.end(request, "length")

    # Waiting requests

    def _admit(self, group: Group, draft: PlanDraft, now_s: float) -> None:
        """Start waiting requests, in the queue's order, while slots, memory and budget last."""
        left: list[Request] = []
        self._admission.begin(group, now_s)
        while draft.budget_left and group.has_free_slot:
            request = self._queue.pop(now_s)
            if request is None:
                break
            verdict, matched = self._admission.place(request, draft.num_tokens)
            if verdict is Verdict.START and self._fits_budget(group, request, matched, draft):
                self._start(group, draft, request, matched, now_s)
            elif verdict is Verdict.NEVER:
                self._refuse(request)
            else:
                left.append(request)
                if verdict is not Verdict.PASS or len(left) == MAX_LOOKAHEAD:
                    break
        for request in left:
            self._queue.put_back(request)

    def leaves_all(self, group: Group, now_s: float) -> bool:
        """Whether a group whose steps are all alike would start nothing that waits, planning when its step has ended.

        If so the look counts like that of a plan; if not, it is as if it had not been taken.
        """
        if group.draining or not group.has_free_slot or self._config.max_num_batched_tokens <= len(group.decodes):
            return True
        looked: list[tuple[Request, int]] = []
        starts = False
        self._admission.begin(group, now_s)
        while (request := self._queue.pop(now_s)) is not None:
            looked.append((request, request.num_passes))
            # The plan's own decodes are drafted and the step's have landed by then: together nothing is added.
            verdict, _ = self._admission.place(request, 0)
            starts = verdict in (Verdict.START, Verdict.NEVER)
            if verdict is not Verdict.PASS or len(looked) == MAX_LOOKAHEAD:
                break
        for request, num_passes in looked:
            if starts:
                request.num_passes = num_passes
            self._queue.put_back(request)
        if starts:
            self._admission.forget()
        return not starts

    def _fits_budget(self, group: Group, request: Request, matched: list[int], draft: PlanDraft) -> bool:
        """Without chunked prefill a prompt is computed in one piece."""
        if self._config.enable_chunked_prefill:
            return True
        return request.num_tokens - group.num_found(request, matched) <= draft.budget_left

    def _start(self, group: Group, draft: PlanDraft, request: Request, matched: list[int], now_s: float) -> None:
        saved = group.saved_for(request)
        imports = group.kv.admit(request, matched, saved)
        if saved is not None:
            draft.add_imports(saved.group_id, imports)
            self._counters.num_imported_blocks += len(imports)
        group.seat(request)
        if request.queue_s < 0:
            request.queue_s = now_s - request.arrival_s
            request.num_cached_tokens = request.num_computed
        self._counters.prefix_cache_queries += request.num_tokens
        self._counters.prefix_cache_hits += len(matched) * self._config.block_size
        draft.add_slot(request)
        if not self._add_chunk(request, draft):
            group.prefills.append(request)

    def _refuse(self, request: Request) -> None:
        """Groups came and went since it was let in, and none that is here could hold it."""
        if request.num_output_tokens:
            self._ledger.end(request, "length")
        else:
            self._ledger.end(request, "error", f"{request.num_tokens} tokens do not fit in any group's KV blocks")

    def _whole_prompt_first(self, group: Group, draft: PlanDraft, now_s: float) -> bool:
        """Without chunked prefill: let decodes pause for this step if the next prompt does not fit beside them.

        Never in two steps of a group in a row, so running streams get a token at least in every second step.
        """
        if self._config.enable_chunked_prefill or group.draining or not len(self._queue) or not len(group.decodes):
            return False
        if group.paused_decodes or not group.has_free_slot:
            group.paused_decodes = False
            return False
        request = self._queue.pop(now_s)
        if request is None:
            return False
        self._admission.begin(group, now_s)
        verdict, matched = self._admission.place(request, len(group.decodes))
        owed = request.num_tokens - group.num_found(request, matched)
        room = self._config.max_num_batched_tokens - len(group.decodes) - len(group.forks)
        self._queue.put_back(request)
        group.paused_decodes = verdict is Verdict.START and owed > room and not group.forks
        return group.paused_decodes

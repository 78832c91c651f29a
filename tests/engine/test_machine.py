"""State machine over everything that can happen to a scheduler, with workers that prove what they read.

Laws, checked after every call or at the end: every block and slot is accounted for and no shared block is written
(`check_invariants`); every token reads exactly its own history, and no step exceeds the budget (the fake worker); every
choice ends exactly once; its tokens are those of its solo run, none lost, none repeated; requests start in the order of
their arrival under fcfs in one group; work that can be done gets done.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from fake_worker import FakeWorker, Model
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.errors import RequestRefused
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult, TokenDelta
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.engine.scheduler import Scheduler

MAX_LEN = 64
RARELY = st.sampled_from([False] * 5 + [True])
SHARED = [(i * 37) % 47 + 3 for i in range(40)]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    chunked = draw(st.sampled_from([True, True, True, False]))
    return SchedulerConfig(
        max_model_len=MAX_LEN,
        eos_token_ids=(2,),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_batched_tokens=draw(st.sampled_from([4, 8, 24])) if chunked else MAX_LEN,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "fair", "deadline"])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_steps_in_flight=draw(st.integers(1, 3)),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 0, 3])),
        tenant_weights={"b": 2.0},
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        config=configs(),
        pool_tokens=st.sampled_from([40, 64, 200]),
        num_groups=st.sampled_from([1, 2, 2, 3]),
        one_host=st.booleans(),
    )
    def start(self, config, pool_tokens, num_groups, one_host) -> None:
        self.config = config
        self.one_host = one_host  # the groups can read each other's pools
        self.model = Model()
        self.scheduler = Scheduler(self.config)
        self.num_blocks = pool_tokens // config.block_size
        self.now = 0.0
        self.workers: dict[int, FakeWorker] = {}
        self.plans: dict[int, deque[StepPlan]] = {}
        self.results: dict[int, deque[StepResult]] = {}
        self.stale: list[tuple[int, StepResult]] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.open: set[tuple[str, int]] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.failed: set[tuple[str, int]] = set()
        self.num_losses = 0
        self.ordered = num_groups == 1 and config.scheduling_policy in ("fcfs", "priority")
        self.start_order: list[int] = []
        self.sent_again: set[int] = set()
        for group in range(num_groups):
            self._new_group(group)

    def _new_group(self, group: int) -> None:
        config = self.config
        self.workers[group] = FakeWorker(
            self.num_blocks, config.block_size, config.max_num_seqs, MAX_LEN, config.max_num_batched_tokens, self.model
        )
        self._join(group)

    def _join(self, group: int) -> None:
        """A worker that is new, or that a scheduler before this one has left."""
        kept = self.workers[group].slots.kept()
        self.workers[group].reset()
        self.scheduler.add_group(group, self.num_blocks, kept)
        self.plans[group] = deque()
        self.results[group] = deque()
        for other in self.scheduler._groups.keys() - {group} if self.one_host else ():
            self._share_pool(other, group)
            self._share_pool(group, other)

    def _share_pool(self, owner: int, reader: int) -> None:
        """Workers hear of it after the plans that they have, here and below."""
        self._work_off(reader)
        self.workers[reader].hold(owner, self.workers[owner])
        self.scheduler.share_pool(owner, reader)

    @rule(group=st.integers(0, 3), happens=RARELY)
    def forget_pool(self, group, happens) -> None:
        if happens and group not in self.workers:
            self.scheduler.forget_pool(group)
            for reader, worker in self.workers.items():
                self._work_off(reader)
                worker.held.pop(group, None)

    def _receive(self, deltas: dict[int, list[TokenDelta]]) -> None:
        for stream, some in deltas.items():
            for delta in some:
                key = (delta.request_id, delta.choice_index)
                assert key in self.open, f"{key} is not open and got {delta}"
                assert self.requests[delta.request_id].stream == stream
                self.tokens[key].extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.reasons[key] = delta.finish_reason
                    self.open.remove(key)

    # Requests

    @rule(
        shared=st.integers(0, 36),
        own=st.lists(st.integers(3, 49), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        min_tokens=st.sampled_from([0, 0, 3]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "", "s"]),
        patience=st.sampled_from([None, None, 0.2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        stops=st.sampled_from([(), (), (7, 9)]),
        grammar=st.sampled_from([None, None, Grammar("regex", "a")]),
        stream=st.integers(0, 2),
    )
    def add(
        self,
        shared,
        own,
        max_tokens,
        min_tokens,
        n,
        priority,
        tenant,
        salt,
        patience,
        prompt_logprobs,
        stops,
        grammar,
        stream,
    ):
        number = len(self.requests)
        prompt = (*SHARED[:shared], *own)
        request = GenerateRequest(
            f"r{number}",
            prompt,
            SamplingParams(
                min(max_tokens, MAX_LEN - len(prompt)),
                seed=number,
                min_tokens=min_tokens,
                prompt_logprobs=prompt_logprobs,
                stop_token_ids=stops,
                grammar=grammar,
            ),
            stream=stream,
            n=n,
            priority=priority,
            tenant=tenant,
            cache_salt=salt,
            deadline_s=None if patience is None else self.now + patience,
        )
        self._add(request)

    def _add(self, request: GenerateRequest) -> None:
        self.requests[request.request_id] = request
        try:
            self.scheduler.add(request, self.now)
        except RequestRefused:
            too_long = len(request.prompt_token_ids) > self.num_blocks * self.config.block_size
            assert too_long, "refused although it fits"
            return
        for choice in range(request.n):
            self.open.add((request.request_id, choice))
            self.tokens[request.request_id, choice] = []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole) -> None:
        request_id, choice = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.abort(request_id, None if whole else choice)
        self.open -= {key for key in self.open if key[0] == request_id and (whole or key[1] == choice)}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def resubmit(self, data) -> None:
        """The router lost the connection for a moment and sends a choice again, with the ids that it has seen."""
        self._add_again(data.draw(st.sampled_from(sorted(self.open))))

    def _add_again(self, key: tuple[str, int]) -> None:
        request = self.requests[key[0]]
        seen = tuple(self.tokens[key])
        self.sent_again.add(request.sampling.seed)
        again = GenerateRequest(
            key[0],
            request.prompt_token_ids,
            request.sampling,
            stream=request.stream,
            output_token_ids=seen,
            choice_index=key[1],
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )
        try:
            self.scheduler.add(again, self.now)
        except RequestRefused:
            too_long = len(request.prompt_token_ids) > self.num_blocks * self.config.block_size
            assert too_long, "let in once, and not because no group was there to say what fits"
            self.open.remove(key)

    @rule(stream=st.integers(0, 2), happens=RARELY)
    def lose_stream(self, stream, happens) -> None:
        if happens:
            self.scheduler.abort_stream(stream)
            self.open = {key for key in self.open if self.requests[key[0]].stream != stream}

    @rule(happens=RARELY)
    def abort_before_add(self, happens) -> None:
        if not happens:
            return
        number = len(self.requests)
        request = GenerateRequest(f"r{number}", (5, 6), SamplingParams(3, seed=number))
        self.requests[request.request_id] = request
        self.scheduler.abort(request.request_id)
        self.scheduler.add(request, self.now)

    # Steps

    @rule(data=st.data())
    def schedule(self, data) -> None:
        if self.workers:
            self._schedule(data.draw(st.sampled_from(sorted(self.workers))))

    def _schedule(self, group: int) -> bool:
        plan = self.scheduler.schedule(group, self.now)
        if plan is None:
            return False
        self.plans[group].append(plan)
        assert len(self.plans[group]) + len(self.results[group]) <= self.config.max_steps_in_flight
        for new in plan.new_slots:
            if new.choice_index == 0 and new.sampling.seed not in self.start_order:
                self.start_order.append(new.sampling.seed)
        return True

    @rule(data=st.data())
    def work(self, data) -> None:
        ready = sorted(group for group, plans in self.plans.items() if plans)
        if ready:
            self._work(data.draw(st.sampled_from(ready)))

    def _work_off(self, group: int) -> None:
        while self.plans[group]:
            self._work(group)

    def _work(self, group: int) -> None:
        self.results[group].append(self.workers[group].step(self.plans[group].popleft()))

    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]))
    def apply(self, data, fails) -> None:
        ready = sorted(group for group, results in self.results.items() if results)
        if ready:
            self._apply(data.draw(st.sampled_from(ready)), fails)

    def _apply(self, group: int, fails: bool = False) -> None:
        result = self.results[group].popleft()
        if fails:
            worker = self.workers[group]
            record = self.scheduler._groups[group].in_flight[0]
            running = [row for row in record.decodes.rows if row.slot in worker.live]
            if running:
                request = running[0]
                slot = int.from_bytes(record.decodes.slots[:4], "little")
                if request.slot == slot:
                    result = StepResult(result.step_id, result.token_ids, result.num_tokens, failed={slot: "grammar"})
                    self.failed.add((request.request_id, request.choice_index))
        self._receive(self.scheduler.apply(group, result, self.now))

    @rule(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), rounds=st.integers(1, 6))
    def begin(self, lengths, rounds) -> None:
        """Single calls alone hardly ever bring streams under way before something else happens."""
        for length in lengths:
            number = len(self.requests)
            self._add(GenerateRequest(f"r{number}", (*SHARED[:length], 5), SamplingParams(30, seed=number)))
        for _ in range(rounds):
            self._round()

    def _round(self) -> bool:
        """A plan, a step and a result of each group; whether anything moved."""
        moved = False
        for group in self.workers:
            moved |= self._schedule(group)
            if self.plans[group]:
                self._work(group)
            if self.results[group]:
                self._apply(group)
                moved = True
        return moved

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.5]))
    def wait(self, seconds) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self._receive(self.scheduler.expire(self.now))

    # Groups

    @precondition(lambda self: self.open and self.workers)
    @rule(data=st.data())
    def lose_group(self, data) -> None:
        group = data.draw(st.sampled_from(sorted(self.workers)))
        self._receive(self.scheduler.remove_group(group, self.now))
        self.num_losses += 1
        self.ordered = False
        self.stale += [(group, result) for result in self.results.pop(group)]
        self.plans.pop(group)
        self.workers.pop(group)

    @precondition(lambda self: len(self.workers) < 3)
    @rule()
    def add_group(self) -> None:
        self.ordered = False
        self._new_group(min(set(range(4)) - set(self.workers)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), happens=RARELY)
    def drain_group(self, data, happens) -> None:
        if happens:
            self.scheduler.drain_group(data.draw(st.sampled_from(sorted(self.workers))))

    @rule()
    def stale_result(self) -> None:
        """A result of a lost group arrives late, possibly after a new group took the same id."""
        if self.stale:
            group, result = self.stale.pop()
            self._receive(self.scheduler.apply(group, result, self.now))

    @rule(happens=RARELY)
    def lose_scheduler(self, happens) -> None:
        """Plans on the way and results on the way are gone; the workers live, and routers say again what is open."""
        if not happens:
            return
        self.ordered = False
        self.stale.clear()
        self.scheduler = Scheduler(self.config)
        for group in self.workers:
            self._join(group)
        for key in sorted(self.open):
            self._add_again(key)

    # Laws

    @invariant()
    def all_accounted_for(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._check_order()
        self._new_group(9)  # whatever was lost or drained
        for _ in range(20_000):
            self.now += 0.01
            moved = self._round()
            self._receive(self.scheduler.expire(self.now))
            if not self.open:
                break
            assert moved, f"nothing moves and {self.open} are open: {self.scheduler.stats()}"
        assert not self.open, f"{self.open} never ended"
        while any(self.results.values()) or any(self.plans.values()):
            for group in self.workers:
                if self.plans[group]:
                    self._work(group)
                if self.results[group]:
                    self._apply(group)
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == stats.waiting_tokens == 0
        assert all(group.used_blocks == 0 for group in stats.groups), "blocks leaked"
        for key, reason in self.reasons.items():
            self._check_text(key, reason)

    def _check_order(self) -> None:
        """One group: first starts in the order of arrival, under the priority policy within each priority."""
        if not self.ordered:
            return
        by_priority: dict[int, list[int]] = {}
        for number in self.start_order:
            if number not in self.sent_again:
                priority = self.requests[f"r{number}"].priority if self.config.scheduling_policy == "priority" else 0
                by_priority.setdefault(priority, []).append(number)
        for order in by_priority.values():
            assert order == sorted(order), f"requests started in the order {order}"

    def _check_text(self, key: tuple[str, int], reason: str) -> None:
        request, got = self.requests[key[0]], self.tokens[key]
        solo, solo_reason = self.model.solo(request, key[1], MAX_LEN)
        assert got == solo[: len(got)], f"{key}: {got} is not the start of {solo}"
        if reason == "timeout":
            assert request.deadline_s is not None
            assert not got, f"{key} timed out after its first token"
        elif reason == "error":
            # Failed, or blamed for lost groups, or let in while no group was there to say what fits.
            too_long = len(request.prompt_token_ids) > self.num_blocks * self.config.block_size
            assert key in self.failed or self.num_losses >= self.config.max_group_losses or too_long
        elif len(got) == len(solo):
            assert reason == solo_reason
        else:
            capacity = self.num_blocks * self.config.block_size
            assert reason == "length", f"{key} ended with {reason} before its end"
            assert len(request.prompt_token_ids) + len(got) >= capacity, f"{key} was cut short with memory to spare"


def run(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_machine() -> None:
    run(200, 50)


@pytest.mark.nightly
@pytest.mark.timeout(7200)  # ten minutes of one core
def test_machine_long() -> None:
    run(10_000, 80)

"""A scheduler and its fake workers on a virtual clock, and what came out of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fake_worker import FakeWorker, Model

from orcaserve.engine.baselines import StaticBatchScheduler
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, StepPlan, StepResult, TokenDelta
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler

EOS = 2
NO_EOS = Model(eos_share=0.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Any prompt; a longer one of the same seed begins with it."""
    rng = random.Random(seed)
    return [rng.randrange(3, 50) for _ in range(length)]


def make_config(**changes: Any) -> SchedulerConfig:
    base = SchedulerConfig(
        max_model_len=256,
        eos_token_ids=(EOS,),
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        watermark=0.0,
    )
    return msgspec.structs.replace(base, **changes)


class Harness:
    def __init__(
        self,
        num_blocks: int = 64,
        num_groups: int = 1,
        model: Model | None = None,
        scheduler: type[Scheduler] | type[StaticBatchScheduler] = Scheduler,
        **config: Any,
    ) -> None:
        self.config = make_config(**config)
        self.model = model or Model()
        self.scheduler: Any = scheduler(self.config)
        self.num_blocks = num_blocks
        self.now = 0.0
        self.workers: dict[int, FakeWorker] = {}
        self.plans: dict[int, deque[StepPlan]] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.deltas: list[TokenDelta] = []
        self.log: list[tuple[int, StepPlan]] = []
        for group in range(num_groups):
            self.add_group(group, num_blocks)

    def add_group(self, group: int, num_blocks: int) -> None:
        config = self.config
        self.scheduler.add_group(group, num_blocks)
        self.workers[group] = FakeWorker(
            num_blocks,
            config.block_size,
            config.max_num_seqs,
            config.max_model_len,
            config.max_num_batched_tokens,
            self.model,
        )
        self.plans[group] = deque()

    def share_pools(self) -> None:
        """Every group can read every other one's pool."""
        for reader in self.workers:
            for owner in self.workers:
                if owner != reader:
                    self.workers[reader].hold(owner, self.workers[owner])
                    self.scheduler.share_pool(owner, reader)

    def replace_scheduler(self) -> None:
        """The scheduler is lost with all that it knew; another one takes the workers over."""
        self.scheduler = type(self.scheduler)(self.config)
        for group, worker in self.workers.items():
            kept = worker.slots.kept()
            worker.reset()
            self.plans[group].clear()
            self.scheduler.add_group(group, worker.num_blocks, kept)

    def lose_group(self, group: int) -> None:
        del self.workers[group], self.plans[group]
        self.take(self.scheduler.remove_group(group, self.now))

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> str:
        number = len(self.requests)
        sampling = fields.pop("sampling", {})
        request = GenerateRequest(
            fields.pop("request_id", f"r{number}"),
            tuple(prompt),
            SamplingParams(max_tokens, seed=sampling.pop("seed", number), **sampling),
            **fields,
        )
        self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        return request.request_id

    def schedule(self, group: int = 0) -> StepPlan | None:
        plan: StepPlan | None = self.scheduler.schedule(group, self.now)
        if plan is not None:
            self.plans[group].append(plan)
            self.log.append((group, plan))
        return plan

    def work(self, group: int = 0) -> StepResult:
        return self.workers[group].step(self.plans[group].popleft())

    def finish_step(self, group: int = 0, **changes: Any) -> list[TokenDelta]:
        result = msgspec.structs.replace(self.work(group), **changes)
        return self.take(self.scheduler.apply(group, result, self.now))

    def take(self, deltas: dict[int, list[TokenDelta]]) -> list[TokenDelta]:
        self.scheduler.check_invariants()
        new = [delta for some in deltas.values() for delta in some]
        self.deltas += new
        return new

    def round(self) -> bool:
        """As many plans as each group takes, then one result of each; whether anything moved."""
        self.now += 0.01
        moved = False
        for group in list(self.workers):
            while self.schedule(group) is not None:
                moved = True
            if self.plans[group]:
                self.finish_step(group)
                moved = True
        return moved

    def run(self, max_rounds: int = 5000) -> None:
        for _ in range(max_rounds):
            if not self.round():
                break
        else:
            raise AssertionError(f"still running after {max_rounds} rounds: {self.scheduler.stats()}")
        self.take(self.scheduler.expire(self.now))
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == 0, stats
        assert all(group.used_blocks == 0 for group in stats.groups), "blocks leaked"

    def text(self, request_id: str, choice: int = 0) -> list[int]:
        return [t for d in self.deltas if (d.request_id, d.choice_index) == (request_id, choice) for t in d.token_ids]

    def reason(self, request_id: str, choice: int = 0) -> str | None:
        reasons = [
            d.finish_reason
            for d in self.deltas
            if (d.request_id, d.choice_index) == (request_id, choice) and d.finish_reason
        ]
        assert len(reasons) <= 1, f"{request_id} ended {len(reasons)} times"
        return reasons[0] if reasons else None

    def first_delta(self, request_id: str, choice: int = 0) -> TokenDelta:
        return next(d for d in self.deltas if (d.request_id, d.choice_index) == (request_id, choice))

    def solo(self, request_id: str, choice: int = 0) -> list[int]:
        return self.model.solo(self.requests[request_id], choice, self.config.max_model_len)[0]

    def assert_solo(self) -> None:
        """Every choice of every request has the text and the reason of its solo run."""
        for request_id, request in self.requests.items():
            for choice in range(request.n):
                text, reason = self.model.solo(request, choice, self.config.max_model_len)
                assert self.text(request_id, choice) == text, f"{request_id}, choice {choice}"
                assert self.reason(request_id, choice) == reason


def rows(plan: StepPlan) -> int:
    return len(plan.decode_slots) // 4


def num_tokens(plan: StepPlan) -> int:
    return sum(chunk.num_tokens for chunk in plan.chunks) + rows(plan)


def decode_slots(plan: StepPlan) -> list[int]:
    slots: list[int] = np.frombuffer(plan.decode_slots, np.int32).tolist()
    return slots

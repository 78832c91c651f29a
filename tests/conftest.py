"""Shared by the tests of all rooms: hypothesis' profile, the order, and a rank that needs no model."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from orcaserve.cluster.channel import BlockingClient, ChannelClosed, Endpoint
from orcaserve.cluster.wire import Done, Hello, Leave, Step, ToRank
from orcaserve.engine.messages import StepPlan, StepResult
from orcaserve.workers.slots import SlotTable

# Before ray is imported: it stays on loopback, joins a cluster with its token, and its workers (15 steps nicer, unless
# told otherwise) get their share of the cores beside other tests.
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_worker_niceness": "0",
}

# Whose tests bring up Ray.
SERVERS = (
    *("test_e2e", "test_e2e_memory", "test_fleet", "test_ray_autoscaler", "test_serve_deploy", "test_served_cases"),
    "test_start",
)

settings.register_profile("orcaserve", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("orcaserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with Ray begin at once."""
    items.sort(key=lambda item: item.path.stem not in SERVERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side, a file stays together, and those with Ray go one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if Path(file).stem in SERVERS else file

    return ByFile(config, log)


def counted_token(prompt: list[int], position: int, choice: int = 0) -> int:
    """The token that a CountingRank finds at a position: it depends on the whole prompt, the place and the choice."""
    return (sum(prompt) * 31 + position * 7 + choice * 13) % 1000 + 10


def counted_tokens(prompt: list[int], num_tokens: int, choice: int = 0) -> list[int]:
    return [counted_token(prompt, len(prompt) + i, choice) for i in range(num_tokens)]


class CountingRank:
    """A real rank on a real channel, in a thread, whose model is a sum. `gate` holds its steps back while cleared."""

    def __init__(self, endpoint: Endpoint, hello: Hello, max_num_seqs: int = 64, max_model_len: int = 4096) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.plans: list[StepPlan] = []
        self._slots = SlotTable(max_num_seqs, max_model_len, block_size=16)
        self._link: BlockingClient[ToRank] = BlockingClient(endpoint, ToRank)
        self._rank = hello.rank
        self._link.send(hello)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while not isinstance(message := self._link.recv(), Leave):
                assert isinstance(message, Step)
                self.gate.wait()
                result = self._step(message.plan)
                if self._rank == 0:
                    self._link.send(Done(result))
        except ChannelClosed:
            pass
        finally:
            self._link.close()

    def _step(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.plans.append(plan)
        table = self._slots
        table.apply_plan(plan)
        rows = [c.slot for c in plan.chunks if c.samples] + np.frombuffer(plan.decode_slots, np.int32).tolist()
        tokens = [self._next(slot) for slot in rows]
        if rows:
            table.append(np.array(rows), np.array(tokens, np.int32))
        return StepResult(plan.step_id, np.array(tokens, np.int32).tobytes())

    def _next(self, slot: int) -> int:
        table = self._slots
        prompt = table.token_ids[slot, : table.num_prompt_tokens[slot]].tolist()
        return counted_token(prompt, int(table.num_tokens[slot]), int(table.choice_index[slot]))


@pytest.fixture
def counting_ranks() -> Iterator[Callable[..., CountingRank]]:
    """Makes CountingRanks; they end with their scheduler's channel, which the test closes."""
    ranks: list[CountingRank] = []

    def make(endpoint: Endpoint, group_id: int, incarnation: str = "a", rank: int = 0) -> CountingRank:
        ranks.append(CountingRank(endpoint, Hello(group_id, incarnation, rank)))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.gate.set()
        rank.thread.join(timeout=10)
        assert not rank.thread.is_alive()

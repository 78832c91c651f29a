"""A grammar that is still being compiled: its slot is left out of the step, and nobody else waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grammar_bench import SCHEMA, Bench, hold
from rank_groups import generate, greedy, make_group, token_ids

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, TokenDelta
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.engine.scheduler import Scheduler
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.worker import Worker


def test_others_are_sampled_as_if_they_were_alone(bench: Bench) -> None:
    bench.take(1, None, temperature=1.0)
    alone = [int(bench.step(1).token_ids[0]) for _ in range(5)]
    event = bench.hold_compiler()
    bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False, logprobs=1)
    bench.take(1, None, temperature=1.0)
    for token in alone:
        sampled = bench.step(0, 1)
        assert sampled.num_tokens.tolist() == [0, 1]
        assert sampled.token_ids.tolist() == [token]
        assert sampled.failed == sampled.logprobs == {}
    event.set()
    bench.await_grammar(0)
    assert bench.finish(0) == ["yes"]


def test_beside_a_slot_that_verifies_a_draft(bench: Bench) -> None:
    bench.take(1, None, temperature=0.0)
    event = bench.hold_compiler()
    bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False)
    draft = np.array([int(bench.logits(1).argmax()), 9], np.int32)
    logits = torch.cat([bench.logits(0), bench.logits(1), bench.logits(1), bench.logits(1)])
    sampled = bench.sampler.verify(logits, np.array([0, 1]), [np.zeros(0, np.int32), draft])
    assert sampled.num_tokens.tolist()[0] == 0
    assert sampled.token_ids.tolist()[0] == draft[0]
    assert len(sampled.token_ids) == sampled.num_tokens.sum()
    event.set()


def test_it_fails_once_its_time_is_over(bench: Bench) -> None:
    now = 0.0
    bench.grammars.clock = lambda: now
    event = bench.hold_compiler()
    bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False)
    bench.take(1, None)
    assert bench.step(0, 1).failed == {}
    now = bench.grammars.compiler.limits.compile_timeout_s + 0.1
    sampled = bench.step(0, 1)
    assert "longer than 10 s" in sampled.failed[0]
    assert sampled.num_tokens.tolist() == [1, 1]
    event.set()


def test_through_scheduler_and_worker(tiny: Callable[..., tuple[Path, Any]], tokenizer_file: Path) -> None:
    """The other stream has its token at every step; in the end all is as if the grammar had been there."""
    folder, _ = tiny("llama", vocab_size=420)
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    requests = [
        greedy("free", [5, 6, 7], 40),
        GenerateRequest("held", (5, 6, 7), SamplingParams(200, 3, grammar=grammar)),
        GenerateRequest("short", tuple(range(5, 37)), SamplingParams(1, 4, grammar=grammar, prompt_logprobs=0), n=2),
    ]
    expected = {size: generate(make_group(folder, size), requests, max_steps_in_flight=2) for size in (1, 2)}
    assert texts(expected[1]) == texts(expected[2])

    config = WorkerConfig(
        model_dir=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        grammar_compile_timeout_s=120.0,
    )
    worker = Worker(config, 0, "")
    worker.load()
    worker.allocate(64)
    assert worker.sampler is not None
    assert worker.sampler.grammars is not None
    event = hold(worker.sampler.grammars.compiler)
    found: dict[str, list[TokenDelta]] = {"free": [], "held": [], "short": []}
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=256, eos_token_ids=(), max_num_batched_tokens=64, max_steps_in_flight=2)
    )
    scheduler.add_group(0, 64)
    for request in requests:
        scheduler.add(request, 0.0)
    num_steps = 0
    while scheduler.has_work(0):
        plans = []
        while (plan := scheduler.schedule(0, 0.0)) is not None:
            plans.append(plan)
        for plan in plans:
            num_steps += 1
            for deltas in scheduler.apply(0, worker.step(plan), 0.0).values():
                for delta in deltas:
                    found[delta.request_id].append(delta)
            scheduler.check_invariants()
            assert len(token_ids(found["free"])) == min(num_steps, 40)
        if num_steps == 20:
            assert found["held"] == found["short"] == []
            event.set()
    worker.close()
    assert texts(found) == texts(expected[1])
    assert [len(d.prompt_logprobs) for d in found["short"] if d.prompt_logprobs] == [32]


def texts(found: dict[str, list[TokenDelta]]) -> dict[str, list[tuple[int, list[int]]]]:
    """By request and choice."""
    return {
        name: [(c, token_ids([d for d in deltas if d.choice_index == c])) for c in {d.choice_index for d in deltas}]
        for name, deltas in found.items()
    }

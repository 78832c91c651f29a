"""The classic demonstration of iteration-level scheduling: six requests, three slots, one line a step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import StepPlan, StepResult, TokenDelta
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import constant
from orcaserve.loadtest.simulate import PlanMeter, Simulation
from orcaserve.loadtest.steps import StepWork
from orcaserve.loadtest.workload import LoadRequest

REQUESTS = ((10, 8), (50, 20), (25, 5), (15, 12), (40, 15), (20, 6))  # prompt, most output tokens
NUM_SLOTS = 3
EOS_PROBABILITY = 0.15
SEED = 42
EOS_ID, WORD_ID = 0, 1


class DemoStep(msgspec.Struct):
    """One line of the table."""

    step: int
    active_slots: int
    tokens: int
    queue_left: int
    events: str


class Demonstration(msgspec.Struct):
    """All lines and the totals."""

    steps: list[DemoStep]
    output_tokens: list[int]  # of each request
    prompt_tokens: int
    computed_tokens: int
    padding_tokens: int  # what iteration-level scheduling computes for nobody
    static_steps: int  # the same answers in batches of three that wait for their longest
    static_computed_tokens: int
    static_padding_tokens: int


class _UnitSteps:
    """Every step takes one unit of time; each sampled token ends its request with EOS_PROBABILITY."""

    def __init__(self, num_slots: int, draw: random.Random) -> None:
        self._meter = PlanMeter(num_slots)
        self._draw = draw

    def step(self, plan: StepPlan) -> tuple[StepResult, StepWork]:
        work = self._meter.measure(plan)
        work.seconds = 1.0
        ids = [EOS_ID if self._draw.random() < EOS_PROBABILITY else WORD_ID for _ in range(work.rows)]
        return StepResult(plan.step_id, np.array(ids, np.int32).tobytes()), work


def run(requests: Sequence[tuple[int, int]] = REQUESTS, num_slots: int = NUM_SLOTS, seed: int = SEED) -> Demonstration:
    """Let the scheduler serve `requests` (prompt tokens, most output tokens), all there at the start."""
    longest = max(prompt + output for prompt, output in requests)
    config = SchedulerConfig(
        max_model_len=longest,
        eos_token_ids=(EOS_ID,),
        max_num_seqs=num_slots,
        max_num_batched_tokens=sum(prompt for prompt, _ in requests),
        enable_prefix_caching=False,
        max_steps_in_flight=1,
    )
    scheduler = Scheduler(config)
    scheduler.add_group(0, num_slots * (-(-longest // config.block_size) + 1))
    load = [LoadRequest(i, prompt, output) for i, (prompt, output) in enumerate(requests)]
    simulation = Simulation(
        scheduler,
        {0: _UnitSteps(num_slots, random.Random(seed))},
        load,
        constant(len(load), float("inf")),
        ignore_eos=False,
        steps_ahead=0,
        arrive_together=True,
    )
    steps: list[DemoStep] = []
    waiting = list(range(len(requests)))

    def on_step(now: float, plan: StepPlan, work: StepWork, deltas: list[TokenDelta]) -> None:
        entered = [waiting.pop(0) for _ in plan.new_slots]
        events = [f"+R{index + 1}" for index in entered]
        events += [f"R{int(d.request_id) + 1} {d.finish_reason}" for d in deltas if d.finish_reason is not None]
        active = len(plan.chunks) + work.decode_tokens
        steps.append(DemoStep(len(steps) + 1, active, work.tokens, len(waiting), ", ".join(events)))

    simulation.on_step(on_step)
    outcome = simulation.run()
    outputs = outcome.output_tokens.tolist()
    prompts = [prompt for prompt, _ in requests]
    static = [
        _static_batch(prompts[i : i + num_slots], outputs[i : i + num_slots]) for i in range(0, len(load), num_slots)
    ]
    return Demonstration(
        steps=steps,
        output_tokens=outputs,
        prompt_tokens=sum(prompts),
        computed_tokens=outcome.computed_tokens,
        padding_tokens=outcome.padding_tokens,
        static_steps=sum(steps for steps, _, _ in static),
        static_computed_tokens=sum(computed for _, computed, _ in static),
        static_padding_tokens=sum(padding for _, _, padding in static),
    )


def _static_batch(prompts: Sequence[int], outputs: Sequence[int]) -> tuple[int, int, int]:
    """Steps, computed and padding tokens of a batch padded to its longest prompt and run to its longest answer.

    The first token comes from the prefill, so an answer of n tokens takes n - 1 decode steps.
    """
    size, steps = len(prompts), max(outputs)
    computed = size * (max(prompts) + steps - 1)
    return steps, computed, computed - sum(prompts) - sum(outputs) + size


def as_text(shown: Demonstration) -> str:
    """The table as it is printed: step, active slots, tokens in the step, queue left, events; then the totals."""
    head = f"{'step':>4}  {'active slots':>12}  {'tokens':>6}  {'queue left':>10}  events"
    lines = [head, "-" * len(head)]
    lines += [f"{s.step:>4}  {s.active_slots:>12}  {s.tokens:>6}  {s.queue_left:>10}  {s.events}" for s in shown.steps]
    total = totals(shown)
    answers = ", ".join(f"R{i + 1} {n}" for i, n in enumerate(shown.output_tokens))
    lines += [
        "",
        f"answers (tokens): {answers}",
        f"{total['steps']} steps, {shown.prompt_tokens} prompt tokens, {total['output_tokens']} output tokens",
        f"padding: {shown.padding_tokens} of {shown.computed_tokens} computed tokens ({total['padding_share']:.1%})",
        f"the same answers in static batches of {NUM_SLOTS}: {shown.static_steps} steps, padding "
        f"{shown.static_padding_tokens} of {shown.static_computed_tokens} computed tokens "
        f"({total['static_padding_share']:.1%})",
    ]
    return "\n".join(lines)


def totals(shown: Demonstration) -> dict[str, float]:
    """The figures below the table."""
    return {
        "steps": len(shown.steps),
        "prompt_tokens": shown.prompt_tokens,
        "output_tokens": sum(shown.output_tokens),
        "computed_tokens": shown.computed_tokens,
        "padding_share": shown.padding_tokens / shown.computed_tokens,
        "static_steps": shown.static_steps,
        "static_computed_tokens": shown.static_computed_tokens,
        "static_padding_share": shown.static_padding_tokens / shown.static_computed_tokens,
    }

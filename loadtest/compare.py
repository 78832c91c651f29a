"""Two or more servers side by side: from result files, or live in turns (A B A B), so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from orcaserve.loadtest.metrics import Summary
from orcaserve.loadtest.run import RunResult

# name -> (reads it, whether more is better)
FIGURES: dict[str, tuple[Callable[[Summary], float | None], bool]] = {
    "output tokens/s": (lambda s: s.output_throughput, True),
    "requests/s": (lambda s: s.request_throughput, True),
    "goodput/s": (lambda s: s.goodput, True),
    "TTFT mean ms": (lambda s: s.ttft_ms.get("mean"), False),
    "TTFT p99 ms": (lambda s: s.ttft_ms.get("p99"), False),
    "TPOT mean ms": (lambda s: s.tpot_ms.get("mean"), False),
    "ITL p99 ms": (lambda s: s.itl_ms.get("p99"), False),
    "E2E mean ms": (lambda s: s.e2e_ms.get("mean"), False),
}


class Comparison(msgspec.Struct):
    """One figure: the median of each side's runs, and how the other sides stand to the first."""

    figure: str
    values: list[float]  # one a side, median over its runs
    ratios: list[float]  # side / first side, median over the rounds' own ratios
    spread: list[tuple[float, float]]  # lowest and highest ratio of a round
    more_is_better: bool


def compare(sides: Sequence[Sequence[RunResult]]) -> list[Comparison]:
    """`sides[i][k]` is side i's run of round k. Ratios are taken within a round, so slow drift cancels out."""
    rounds = min(map(len, sides), default=0)
    if len(sides) < 2 or not rounds:
        raise ValueError(f"a comparison needs at least two sides with a run each, got {[len(s) for s in sides]}")
    found = []
    for name, (read, more_is_better) in FIGURES.items():
        table = [[read(run.summary) for run in side[:rounds]] for side in sides]
        if any(value is None for row in table for value in row):
            continue
        numbers = np.array(table, np.float64)
        if not (numbers[0] > 0).all():
            continue
        ratios = numbers / numbers[0]
        found.append(
            Comparison(
                name,
                np.median(numbers, axis=1).tolist(),
                np.median(ratios, axis=1).tolist(),
                [(float(low), float(high)) for low, high in zip(ratios.min(axis=1), ratios.max(axis=1), strict=True)],
                more_is_better,
            )
        )
    return found


async def in_turns(sides: Sequence[Callable[[int], Awaitable[RunResult]]], rounds: int) -> list[list[RunResult]]:
    """Run each side once a round, in the given order on even rounds and in reverse on odd ones (A B B A).

    A side is called with the round's number: prompts should differ between rounds, or prefix caches answer them.
    """
    results: list[list[RunResult]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            results[index].append(await sides[index](number))
    return results


def as_table(labels: Sequence[str], comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Rows for a table: figure, each side's value, and the ratios to the first side."""
    rows = [["", *labels, *(f"{label} / {labels[0]}" for label in labels[1:])]]
    for c in comparisons:
        ratios = [
            f"{r:.2f}x ({low:.2f} to {high:.2f})" for r, (low, high) in zip(c.ratios[1:], c.spread[1:], strict=True)
        ]
        rows.append([c.figure, *(f"{v:,.1f}" for v in c.values), *ratios])
    return rows

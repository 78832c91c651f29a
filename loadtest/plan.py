"""Capacity planning: how many groups of which TP size keep the SLO for a workload, found by simulating them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from matplotlib.axes import Axes

from orcaserve.loadtest import plots
from orcaserve.loadtest.arrivals import Times, constant
from orcaserve.loadtest.fleet import Fleet, fit_lengths, run_fleet
from orcaserve.loadtest.metrics import Slo
from orcaserve.loadtest.outcome import Figures, figures
from orcaserve.loadtest.workload import Lengths

LONELY_S = 1e5  # between two requests that shall never meet


class Trial(msgspec.Struct):
    """One simulated fleet."""

    tensor_parallel_size: int
    num_groups: int
    figures: Figures

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.num_groups


class Plan(msgspec.Struct):
    """What was tried, and for each TP size the smallest fleet that keeps the SLO."""

    trials: list[Trial]
    smallest: dict[int, Trial]
    too_small: dict[int, str]  # TP size -> why it cannot serve the model at all
    slo: Slo
    attainment: float

    @property
    def best(self) -> Trial | None:
        """Fewest GPUs; among equals the better attainment."""
        return min(self.smallest.values(), key=lambda t: (t.num_gpus, -t.figures.slo_attainment), default=None)


def plan(
    fleet: Fleet,
    tensor_parallel_sizes: tuple[int, ...],
    times_s: Times,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    slo: Slo,
    attainment: float = 0.99,
    max_groups: int = 1024,
    processes: int = 1,
    on_trial: Callable[[Trial], None] = lambda _trial: None,
) -> Plan:
    """For each TP size: double the groups until the SLO holds, then halve the gap; attainment grows with the groups."""
    prompt_tokens, output_tokens = fit_lengths(prompt_tokens, output_tokens, fleet.max_model_len)
    found = Plan([], {}, {}, slo, attainment)
    longest = int((prompt_tokens + output_tokens).max())

    def trial(tp: int, num_groups: int) -> Trial:
        sized = msgspec.structs.replace(fleet, tensor_parallel_size=tp, num_groups=num_groups)
        outcome = run_fleet(sized, times_s, prompt_tokens, output_tokens, processes)
        done = Trial(tp, num_groups, figures(outcome, num_groups, slo))
        found.trials.append(done)
        on_trial(done)
        return done

    for tp in tensor_parallel_sizes:
        blocks = msgspec.structs.replace(fleet, tensor_parallel_size=tp).num_kv_blocks
        if blocks * fleet.block_size < longest:
            found.too_small[tp] = f"{blocks * fleet.block_size} KV tokens fit beside the weights, {longest} are needed"
            continue
        alone = run_fleet(
            msgspec.structs.replace(fleet, tensor_parallel_size=tp, num_groups=1),
            constant(len(prompt_tokens[:100]), 1 / LONELY_S).times_s,
            prompt_tokens[:100],
            output_tokens[:100],
        )
        kept = figures(alone, 1, slo)
        if kept.slo_attainment < attainment:
            ttft, tpot = kept.ttft_ms.get("p99", 0.0), kept.tpot_ms.get("p99", 0.0)
            found.too_small[tp] = f"too slow even alone: TTFT p99 {ttft:,.0f} ms, TPOT p99 {tpot:,.1f} ms"
            continue
        smallest = _smallest(lambda count, tp=tp: trial(tp, count), attainment, max_groups)  # type: ignore[misc]
        if smallest is None:
            found.too_small[tp] = f"the SLO is not kept with {max_groups} groups"
        else:
            found.smallest[tp] = smallest
    return found


def _smallest(trial: Callable[[int], Trial], attainment: float, max_groups: int) -> Trial | None:
    low, high = 0, 1  # low fails (or is 0); high is tried next
    while (last := trial(high)).figures.slo_attainment < attainment:
        if high >= max_groups:
            return None
        low, high = high, min(2 * high, max_groups)
    while high - low > 1:
        middle = (low + high) // 2
        tried = trial(middle)
        if tried.figures.slo_attainment >= attainment:
            high, last = middle, tried
        else:
            low = middle
    return last


def picture(found: Plan, title: str) -> bytes:
    """SLO attainment against the number of GPUs, a line for each TP size; rings mark the smallest that keep it."""

    def draw(axes: Axes) -> None:
        for color, tp in zip(plots.COLORS, sorted({t.tensor_parallel_size for t in found.trials}), strict=False):
            line = sorted((t for t in found.trials if t.tensor_parallel_size == tp), key=lambda t: t.num_gpus)
            gpus = [t.num_gpus for t in line]
            axes.plot(gpus, [100 * t.figures.slo_attainment for t in line], "o-", color=color, label=f"TP={tp}")
            if tp in found.smallest:
                best = found.smallest[tp]
                axes.plot(best.num_gpus, 100 * best.figures.slo_attainment, "o", ms=13, mfc="none", color=color)
                axes.annotate(
                    f"{best.num_groups} groups",
                    (best.num_gpus, 100 * best.figures.slo_attainment),
                    textcoords="offset points",
                    xytext=(8, -14),
                    fontsize=8,
                    color=color,
                )
        axes.axhline(100 * found.attainment, color="#64748b", linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        ticks = sorted({t.num_gpus for t in found.trials})
        axes.set_xticks(ticks[:: max(1, len(ticks) // 10)])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("requests that keep the SLO, %")
        axes.set_ylim(0, 103)
        axes.legend(fontsize=8, frameon=False, loc="lower right")

    return plots.png(draw, title, width=8.0, height=4.2)


def rows(found: Plan) -> list[list[str]]:
    """A table of the smallest fleets and of the sizes that cannot do it."""
    head = ["TP", "groups", "GPUs", "SLO kept", "TTFT p99 ms", "TPOT p99 ms", "output tok/s", "mean batch"]
    table = [head]
    for tp, best in sorted(found.smallest.items()):
        f = best.figures
        table.append(
            [
                str(tp),
                str(best.num_groups),
                str(best.num_gpus),
                f"{f.slo_attainment:.2%}",
                f"{f.ttft_ms.get('p99', np.nan):,.0f}",
                f"{f.tpot_ms.get('p99', np.nan):,.1f}",
                f"{f.output_throughput:,.0f}",
                f"{f.mean_batch:.1f}",
            ]
        )
    table += [[str(tp), "-", "-", why, "", "", "", ""] for tp, why in sorted(found.too_small.items())]
    return table

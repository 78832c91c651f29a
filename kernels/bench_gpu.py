"""Checks and times every operation on a GPU, each beside the ceiling measured in the same run and beside its peers.

`run` is what `python -m orcaserve.kernels.bench --device cuda` calls. The ceilings: a copy of 1 GiB for what memory
bounds, a bf16 product of 8192 x 8192 matrices for what the tensor cores bound. Between two timings the L2 cache is
overwritten, since in a model the weights do that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from orcaserve.kernels.bench_cases import BUILDERS, Case
from orcaserve.kernels.dispatch import BackendUnavailable

REPETITIONS = 30
FLUSH_BYTES = 512 * 2**20  # several times any L2 cache, and long enough to hide a launch
COPY_BYTES = 2**30
MATMUL_SIZE = 8192
TOLERANCE = 2e-2  # bf16: one rounding of a value near 2, as in the tests


def run(ops: list[str]) -> dict[str, Any]:
    """Checks and times the named operations (all if none is named), prints a line for each, returns all figures.

    Raises ValueError for an unknown name and BackendUnavailable without a GPU.
    """
    unknown = sorted(set(ops) - set(BUILDERS))
    if unknown:
        raise ValueError(f"no operation {', '.join(unknown)}; there are {', '.join(BUILDERS)}")
    if not torch.cuda.is_available():
        raise BackendUnavailable("bench", "triton", "cuda", "torch sees no CUDA device")
    clock = GpuClock()
    ceilings = {"copy_gb_s": _copy_rate(clock), "matmul_tflop_s": _matmul_rate(clock)}
    print(f"{torch.cuda.get_device_name()}: copy {ceilings['copy_gb_s']:.0f} GB/s, "
          f"bf16 matmul {ceilings['matmul_tflop_s']:.0f} TFLOP/s")  # fmt: skip
    results: list[dict[str, Any]] = []
    for op in ops or BUILDERS:
        for case in BUILDERS[op]("cuda"):
            results.append(measure(case, clock.time_us, ceilings))
            print(describe(results[-1]), flush=True)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, **ceilings,
            "results": results, "all_correct": all(result["correct"] is not False for result in results)}  # fmt: skip


class GpuClock:
    """Median time of a call on the GPU alone, the L2 cache cold."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time_us(self, call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                  for _ in range(REPETITIONS)]  # fmt: skip
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def measure(case: Case, time_us: Callable[[Callable[[], Any]], float], ceilings: dict[str, float]) -> dict[str, Any]:
    """Correctness first, then the time of ours and of each peer; a peer that fails is recorded with its reason."""
    result: dict[str, Any] = {"op": case.op, "case": case.name, "correct": None}
    if case.expected is not None:
        result["correct"] = matches((case.checked_call or case.call)(), case.expected())
    result["us"] = time_us(case.call)
    if case.num_flops:
        result["tflop_s"] = case.num_flops / result["us"] / 1e6
        result["share"] = result["tflop_s"] / ceilings["matmul_tflop_s"]
    else:
        result["gb_s"] = case.num_bytes / result["us"] / 1e3
        result["share"] = result["gb_s"] / ceilings["copy_gb_s"]
    for peer, call in case.peers.items():
        try:
            result[f"{peer}_us"] = time_us(call)
        except (BackendUnavailable, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            result[f"{peer}_failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return result


def matches(out: Any, expected: Any) -> bool:
    if isinstance(out, tuple):
        return all(matches(one, other) for one, other in zip(out, expected, strict=True))
    return torch.allclose(out.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


def describe(result: dict[str, Any]) -> str:
    verdict = {True: "correct", False: "WRONG", None: ""}[result["correct"]]
    rate = f"{result['tflop_s']:8.1f} TFLOP/s" if "tflop_s" in result else f"{result['gb_s']:8.1f} GB/s   "
    peers = " ".join(
        f"{name.removesuffix('_us')} {value:.1f} us" for name, value in result.items() if name.endswith("_us")
    )
    return (f"{result['op']:18}{result['case']:34}{result['us']:10.1f} us{rate} {result['share']:6.1%} "
            f"{verdict:8}{peers}")  # fmt: skip


def _copy_rate(clock: GpuClock) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / clock.time_us(lambda: target.copy_(source)) / 1e3


def _matmul_rate(clock: GpuClock) -> float:
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    return 2 * MATMUL_SIZE**3 / clock.time_us(lambda: a @ a) / 1e6

"""The GPU benchmark without a GPU: its cases, small and on the CPU, and its sums are right; it says what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from orcaserve.kernels import bench_cases, bench_gpu
from orcaserve.kernels.bench_cases import BUILDERS, Case, attention_case, visible_pairs
from orcaserve.kernels.dispatch import BackendUnavailable

CEILINGS = {"copy_gb_s": 100.0, "matmul_tflop_s": 10.0}
HEADS = (4, 2, 64)


def once(call: Callable[[], Any]) -> float:
    """A clock that runs the call and says that it took 2 us."""
    call()
    return 2.0


SMALL_CASES = [
    *bench_cases.norms("cpu", 3, 64),
    *bench_cases.gates("cpu", 3, 64),
    *bench_cases.rope_writes("cpu", 20, HEADS),
    *bench_cases.plain_writes("cpu", 20, HEADS),
    *bench_cases.block_copies("cpu", 3, HEADS),
    *bench_cases.samples("cpu", 3, 100),
    attention_case("attention_decode", "decode", [1, 1], [40, 17], HEADS, "cpu"),
    attention_case("attention_mixed", "mixed", [1, 20], [40, 37], HEADS, "cpu", window=16, softcap=20.0),
]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: f"{case.op} {case.name}")
def test_cases_are_right(case: Case) -> None:
    result = bench_gpu.measure(case, once, CEILINGS)
    assert result["correct"]
    assert case.op in BUILDERS
    assert result["share"] > 0
    assert case.op in bench_gpu.describe(result)


def test_a_wrong_result_is_seen() -> None:
    case = Case("op", "wrong", lambda: torch.zeros(2), lambda: torch.ones(2), num_bytes=1)
    result = bench_gpu.measure(case, once, CEILINGS)
    assert result["correct"] is False
    assert "WRONG" in bench_gpu.describe(result)


def test_rates_and_shares() -> None:
    bytes_bound = bench_gpu.measure(Case("op", "", lambda: 0, None, num_bytes=100_000), once, CEILINGS)
    assert bytes_bound["gb_s"] == pytest.approx(50.0)
    assert bytes_bound["share"] == pytest.approx(0.5)
    flops_bound = bench_gpu.measure(Case("op", "", lambda: 0, None, num_flops=4_000_000), once, CEILINGS)
    assert flops_bound["tflop_s"] == pytest.approx(2.0)
    assert flops_bound["share"] == pytest.approx(0.2)


def test_peers_run_beside_and_one_that_cannot_is_no_failure() -> None:
    """torch's attention runs here; flashinfer and xformers do not."""
    case = attention_case("attention_prefill", "prefill", [20, 20], [37, 37], HEADS, "cpu")
    case.peers.pop("flex")  # its compilation takes half a minute here
    result = bench_gpu.measure(case, once, CEILINGS)
    assert result["sdpa_us"] == 2.0
    assert "flashinfer" in result["flashinfer_failed"]
    torch.testing.assert_close(
        case.peers["sdpa"]().transpose(1, 2).flatten(0, 1).float(), case.call().float(), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize(("query_len", "context_len"), [(1, 1), (1, 9), (7, 7), (5, 12), (12, 12)])
def test_visible_pairs(window: int, query_len: int, context_len: int) -> None:
    counted = sum(
        key <= query and (not window or key > query - window)
        for query in range(context_len - query_len, context_len)
        for key in range(context_len)
    )
    assert visible_pairs(window, query_len, context_len) == counted


def test_decode_is_counted_by_the_keys_and_values_it_reads() -> None:
    case = attention_case("attention_decode", "", [1, 1], [100, 10], HEADS, "cpu", window=50)
    pool_bytes = 2 * (50 + 10) * 2 * 64 * 2
    assert case.num_bytes == pool_bytes + 2 * (2 * 4 * 64) * 2
    assert case.num_flops == 0


def test_what_is_unknown_or_absent_is_named() -> None:
    with pytest.raises(ValueError, match="softmax"):
        bench_gpu.run(["softmax"])
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="no CUDA device"):
            bench_gpu.run(["rms_norm"])

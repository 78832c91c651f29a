"""The benchmark runs, ends with one JSON object, and refuses what it does not know."""

from __future__ import annotations

import json

import pytest
import torch

from orcaserve.kernels import bench, cpu
from orcaserve.kernels.cpu.library import library
from orcaserve.kernels.paged_attention import paged_attention
from tests.kernels.cpu_cases import threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")


def test_prints_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    with threads(1):
        team = torch.get_num_threads()
        bench.main(["rows", "--device", "cpu", "--threads", "1", "--repeats", "1"])
        torch.set_num_threads(team)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["threads"] == 1
    assert figures["read_gb_per_s"] > 0
    assert figures["rms_norm_speedup"] > 0


def test_baselines_compute_what_we_compute() -> None:
    for case in (bench.attention_case([1] * 3, [256] * 3), bench.attention_case([100], [100])):
        q, _, batch = case
        ours = paged_attention(*case, bench.HEAD_DIM**-0.5).float()
        for repeat_heads in (False, True):
            theirs = torch.cat(
                [part[0].transpose(0, 1) for part in bench.gather_and_sdpa(*case, repeat_heads=repeat_heads)]
            )
            torch.testing.assert_close(ours, theirs.float(), atol=2e-2, rtol=2e-2)
        if batch.max_query_len == 1:
            together = bench.batched_gather_and_sdpa(*case).reshape(q.shape)
            torch.testing.assert_close(ours, together.float(), atol=2e-2, rtol=2e-2)


def test_the_ceiling_counts_what_it_does() -> None:
    assert library().orca_multiply_adds(1) > 0
    assert library().orca_multiply_adds(10**9) >= 10**9


def test_an_unknown_operation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["sums", "--device", "cpu"])
    assert "not sums" in capsys.readouterr().err

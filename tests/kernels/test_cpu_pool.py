"""The team of threads behind the native operations: complete results from several callers, and rest in between."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from orcaserve.kernels import cpu
from orcaserve.kernels.linear import linear, pack
from tests.kernels.cpu_cases import threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")


def test_several_callers_at_once_get_complete_results() -> None:
    packed = pack(torch.randn(300, 64))
    inputs = [torch.randn(1 + 7 * i, 64) for i in range(8)]
    with threads(1):
        expected = [linear(x, packed) for x in inputs]

    def run(i: int) -> bool:
        return all(torch.equal(linear(inputs[i], packed), expected[i]) for _ in range(200))

    with threads(3), ThreadPoolExecutor(8) as callers:
        assert all(callers.map(run, range(8)))


def test_the_team_may_grow_and_shrink() -> None:
    packed, x = pack(torch.randn(300, 64)), torch.randn(20, 64)
    with threads(1):
        expected = linear(x, packed)
    for count in (2, 4, 1, 3, 2):
        with threads(count):
            assert torch.equal(linear(x, packed), expected)


def test_an_idle_team_uses_no_time() -> None:
    packed, x = pack(torch.randn(300, 64)), torch.randn(20, 64)
    with threads(3):
        linear(x, packed)
        time.sleep(0.01)  # longer than a member looks for work
        used_s = []
        for _ in range(5):  # others of this process may have something to do
            before_s = time.process_time()
            time.sleep(0.1)
            used_s.append(time.process_time() - before_s)
        assert min(used_s) < 0.03


def test_a_forked_child_can_still_work() -> None:
    packed, x = pack(torch.randn(300, 64)), torch.randn(20, 64)
    with threads(3):
        expected = linear(x, packed)
        child = os.fork()
        if child == 0:  # the members did not come along
            os._exit(0 if torch.equal(linear(x, packed), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0

"""What a drill counts: tokens too many and too few, streams that differ, and how long each stream was silent."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter

import pytest

from orcaserve.loadtest.chaos import Case, Stream, _spread, _wait, parse_kinds
from orcaserve.loadtest.faults import FAULT_KINDS, Injector, schedule

CASE = Case([1], 6, 0.0, [5, 6, 7, 8, 9, 10], "abcdef")


@pytest.mark.parametrize(
    ("ids", "closed", "error", "repeated_and_missing", "identical"),
    [
        ([5, 6, 7, 8, 9, 10], False, "", (0, 0), True),
        ([5, 6, 7, 7, 8, 9, 10], False, "", (1, 0), False),
        ([5, 6, 9, 10], False, "", (0, 2), False),
        ([5, 6, 99, 8, 9, 10], False, "", (1, 1), False),
        ([5, 6, 7], False, "", (0, 3), False),
        ([5, 6, 7], True, "", (0, 0), True),
        ([5, 7], True, "", (1, 1), False),
        ([5, 6, 7], False, "ServerFailed", (0, 0), False),
    ],
)
def test_streams_are_held_against_their_solo_run(
    ids: list[int], closed: bool, error: str, repeated_and_missing: tuple[int, int], identical: bool
) -> None:
    stream = Stream(CASE, ids, CASE.text[: len(ids)], closed=closed, error=error)
    assert stream.differences() == repeated_and_missing
    assert stream.identical == identical


def test_the_right_ids_with_another_text_are_not_identical() -> None:
    assert not Stream(CASE, CASE.token_ids, "abcdeX").identical


def test_a_wait_ends_with_the_first_token_that_was_not_under_way_already() -> None:
    assert _wait([1.0, 2.0, 2.05, 4.5, 4.6], fault_s=2.0) == 2.5
    assert _wait([1.0, 2.0], fault_s=2.0) is None
    spread = _spread([[0.1, 0.2, 3.0], [0.1, 1.0]])
    assert (spread.streams, spread.p50, spread.max, spread.p50_of_slowest) == (5, 0.2, 3.0, 2.0)


def test_all_kinds_come_equally_often_in_an_order_that_the_seed_decides() -> None:
    order = schedule(FAULT_KINDS, 61, random.Random(1))
    counts = Counter(order)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert order == schedule(FAULT_KINDS, 61, random.Random(1)) != schedule(FAULT_KINDS, 61, random.Random(2))


def test_kinds_are_named() -> None:
    assert "node_lost" not in parse_kinds("", num_nodes=0)
    assert parse_kinds("", num_nodes=2) == FAULT_KINDS
    assert parse_kinds("client_closed,worker_killed", num_nodes=0) == ("worker_killed", "client_closed")
    with pytest.raises(ValueError, match="node_lost"):
        parse_kinds("node_lost", num_nodes=0)


def test_only_processes_below_the_root_are_struck() -> None:
    words = ["import sys; sys.stdin.read()", "ray::WorkerActor"]
    worker = subprocess.Popen([sys.executable, "-c", *words], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", words[0]], stdin=subprocess.PIPE)
    try:
        assert not Injector(other.pid, random.Random(0)).strike("worker_killed")
        assert Injector(worker.pid, random.Random(0)).pids("worker") == [worker.pid]
        assert Injector(worker.pid, random.Random(0)).strike("worker_killed")
        assert worker.wait(10) == -9
        assert other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_a_drill_that_is_told_to_end_takes_its_server_along() -> None:
    code = """
import os, signal
from orcaserve.loadtest.drill_site import drill_place
with drill_place("", 1, 0, "http://127.0.0.1:1", 1, 0):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("in order")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (143, "in order\n"), run.stderr


@pytest.mark.nightly  # a minute or two
def test_a_drill_on_several_nodes_loses_nothing() -> None:
    command = [sys.executable, "-m", "orcaserve.cli", "loadtest", "chaos", "--nodes", "2", "--users", "4"]
    kinds = {"node_lost": 1, "worker_killed": 1}
    command += ["--kinds", ",".join(kinds), "--faults", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["faults"] == kinds
    assert [report[name] for name in ("lost", "repeated_tokens", "missing_tokens", "leaked_blocks")] == [0, 0, 0, 0]
    assert set(report["recovery_s"]) <= set(kinds)

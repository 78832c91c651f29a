"""The serving-layer benchmark: its floor server really streams, its cases vary one thing at a time."""

import subprocess
import sys
from pathlib import Path

from orcaserve.cluster.local import free_port
from orcaserve.loadtest.stack import StackCase, StackRow, as_table, growth_cases, measure, ratios


def test_the_bare_server_streams_every_token(tmp_path: Path) -> None:
    [row] = measure(StackCase("uvicorn", 8), tmp_path, tokens_per_stream=16, rounds=1)
    assert row.failed == 0
    assert row.tokens_per_s > 0
    assert row.tokens_per_chunk == 1.0
    assert set(row.cpu_us_per_token) == {"server", "client"}
    assert len(as_table([row])) == 2


def test_a_server_ends_with_the_one_who_measures() -> None:
    command = [sys.executable, "-m", "orcaserve.loadtest.stack_server", "uvicorn", "--port", str(free_port())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(b'{"pids"')
            server.communicate(timeout=60)  # closes its standard input, as the end of our process would
        finally:
            server.kill()
        assert server.returncode == 0


def test_growth_varies_one_thing_at_a_time() -> None:
    cases = growth_cases([1, 64], [1, 2], [1, 4])
    assert [(c.streams, c.routers, c.groups) for c in cases] == [(1, 1, 1), (64, 1, 1), (64, 2, 1), (64, 1, 4)]


def test_ratios_are_of_medians() -> None:
    speeds = {"orcaserve": (10.0, 30.0, 20.0), "ray-generator": (5.0, 5.0, 50.0), "uvicorn": (40.0, 40.0, 1.0)}
    rows = [
        StackRow(StackCase(kind, 1), speed, 1.0, 0, 1.0, 1.0, 1.0, {})  # type: ignore[arg-type]
        for kind, found in speeds.items()
        for speed in found
    ]
    assert ratios(rows) == {"orcaserve / ray-generator": 4.0, "orcaserve / uvicorn": 0.5}

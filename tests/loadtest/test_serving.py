"""A server as it is watched from outside: what it writes, and an end that does not come."""

from __future__ import annotations

import subprocess
import time

import pytest

from orcaserve.loadtest.http_stream import ServerFailed
from orcaserve.loadtest.serving import Serving, processes_under, still_alive

START = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
sys.stdout.buffer.write(b"caf\\xe9 %d\\n" % child.pid)
sys.stdout.flush()
"""


class Stubborn(Serving):
    """Does not go when it is told to."""

    program = ("-c", f"{START}child.wait()")


class Careless(Serving):
    """Goes, and leaves its child behind."""

    program = ("-c", START)


def test_a_server_that_does_not_come_up_is_told_with_its_words() -> None:
    serving = Serving("--nonsense")
    with pytest.raises(ServerFailed, match="ended before it was ready: orcaserve: No such option: --nonsense"):
        serving.wait_ready()
    serving.stop()
    serving = Stubborn()
    with pytest.raises(ServerFailed, match="not ready within 0 s"):
        serving.wait_ready(0)
    with pytest.raises(subprocess.TimeoutExpired):
        serving.stop(within_s=0)


@pytest.mark.parametrize("kind", [Stubborn, Careless])
def test_what_is_not_gone_in_time_is_ended(kind: type[Serving]) -> None:
    serving = kind()
    while not serving.log:
        time.sleep(0.01)
    [(word, child)] = [line.split() for line in serving.log]
    assert word == "caf\N{REPLACEMENT CHARACTER}"
    processes = processes_under(int(child))
    if kind is Careless:
        serving.process.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        serving.stop(within_s=0)
    assert serving.process.poll() is not None
    while still_alive(processes):
        time.sleep(0.01)

"""A start that meets an obstacle, and an end in which all that it brought up is told to go at once."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from orcaserve.loadtest.serving import Serving, still_alive
from orcaserve.workers import demo

# `orcaserve serve`, except that a stranger sits on a port of its proxy until Ray Serve has given that proxy up.
OBSTRUCTED = """
import socket, sys
from orcaserve import cli
from orcaserve.cluster import serve
from orcaserve.cluster.local import LocalRay

strangers = []

class Obstructed(LocalRay):
    def __init__(self):
        super().__init__()
        strangers.append(socket.create_server(("127.0.0.1", self._stats_port)))

def say(text):
    told(text)
    if "did not start" in text:
        strangers.pop().close()

told, cli._say = cli._say, say
serve.LocalRay = Obstructed
sys.argv[0] = "orcaserve"
cli.main()
"""


class ObstructedServing(Serving):
    program = ("-c", OBSTRUCTED)


def test_a_proxy_that_did_not_start_delays_the_start_and_a_signal_to_all_ends_it() -> None:
    demo.pull("smollm2-135m")
    serving = ObstructedServing("--num-threads", "1", "--kv-cache-memory", "64MiB")
    try:
        serving.wait_ready(180)
        assert "did not start" in serving.output
        answer = serving.post("/v1/completions", {"prompt": "One, two,", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4

        processes = serving.processes()
        began_s = time.monotonic()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        serving.process.wait(10)
        while still_alive(processes) and time.monotonic() - began_s < 10:
            time.sleep(0.1)
        assert still_alive(processes) == {}
    finally:
        serving.stop()

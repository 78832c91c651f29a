"""How long a start takes until the first token is there, and what an idle server costs."""

from __future__ import annotations

import http.client
import json
import signal
import time

from orcaserve.loadtest.serving import Serving

SETTLE_S = 3.0
IDLE_S = 10.0


def measure_start(options: tuple[str, ...] = (), idle_s: float = IDLE_S) -> dict[str, float | int]:
    """Starts a server, asks it for one token, leaves it alone for a while and stops it. The model should be cached."""
    serving = Serving(*options)
    try:
        serving.wait_ready()
        ready_s = time.monotonic() - serving.started_s
        _first_token(serving.port)
        first_token_s = time.monotonic() - serving.started_s
        time.sleep(SETTLE_S)
        cpu_s, began_s = serving.cpu_s(), time.monotonic()
        time.sleep(idle_s)
        idle_cpu_percent = 100 * (serving.cpu_s() - cpu_s) / (time.monotonic() - began_s)
        num_processes = len(serving.processes())
    finally:
        stop_s = serving.stop(signal.SIGINT)
    return {
        "ready_s": round(ready_s, 2),
        "first_token_s": round(first_token_s, 2),
        "idle_cpu_percent": round(idle_cpu_percent, 1),
        "num_processes": num_processes,
        "stop_s": round(stop_s, 2),
    }


def _first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.read()[:500]!r}")
    answer.readline()
    connection.close()

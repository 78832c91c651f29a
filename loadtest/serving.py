"""`orcaserve serve` as a user starts it: a process of its own with all that it brings up, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from orcaserve.cluster.local import free_port
from orcaserve.loadtest.http_stream import ServerFailed


class Serving:
    """Starts on construction; `wait_ready` and `stop` wait for what their names say."""

    program: tuple[str, ...] = ("-m", "orcaserve.cli")

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *self.program, "serve", "--port", str(self.port), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.log.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.log)

    @property
    def ray_address(self) -> str:
        [line] = [line for line in self.log if "Ray is at " in line]
        return line.split()[-1]

    def wait_ready(self, within_s: float = 120.0) -> None:
        """Raises ServerFailed with what it printed."""
        while not any(line.startswith("curl ") for line in self.log):
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended before it was ready: {self.output.strip()[-2000:]}")
            if time.monotonic() - self.started_s > within_s:
                raise ServerFailed(f"the server was not ready within {within_s:g} s: {self.output.strip()[-2000:]}")
            time.sleep(0.1)

    def stop(self, sig: signal.Signals = signal.SIGINT, within_s: float = 60.0) -> float:
        """Seconds until it was gone. Ends what is not gone in time, and raises TimeoutExpired."""
        began_s = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            self.process.wait(within_s)
            self._reader.join(within_s)  # until nobody holds its output open
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self.process.args, within_s)
        except subprocess.TimeoutExpired:
            _kill_session(self.process.pid)
            self.process.wait()
            raise
        return time.monotonic() - began_s

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def processes(self) -> dict[int, str]:
        """Everything that this start has brought up and that lives: pid -> command line."""
        return processes_under(self.process.pid)

    def listeners(self) -> list[str]:
        """Addresses that its processes listen on."""
        pids = self.processes()
        lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
        return [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]

    def cpu_s(self) -> float:
        """CPU time that its processes have used so far."""
        return sum(map(cpu_s, self.processes()))


def processes_under(root: int) -> dict[int, str]:
    """A process and all its descendants: pid -> command line."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        todo.extend(children.get(pid, []))
    return found


def _kill_session(leader: int) -> None:
    """End it and all that it has started, also what is nobody's child any more."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def still_alive(pids: dict[int, str]) -> dict[int, str]:
    """Those of the processes that are there under the same command line."""
    alive = {}
    for pid, command in pids.items():
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if now and now == command:
            alive[pid] = command
    return alive

"""The serve configuration of the `cpu` overlay, deployed as KubeRay does it, on a Ray of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orcaserve.cluster.local import free_port
from orcaserve.loadtest.serving import processes_under
from orcaserve.workers import demo

SERVE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "overlays" / "cpu" / "serve.yaml"
BIN = Path(sys.executable).parent

# A head node with a dashboard, where Serve's configuration arrives; all of it ends when the pipe closes.
HEAD = """
import logging, os, sys
from orcaserve.cluster.local import LocalRay
local = LocalRay()
os.environ |= local.environment()
import ray
try:
    ray.init(
        "local", num_cpus=3, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=int(sys.argv[1]),
        _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, log_to_driver=False, logging_level=logging.ERROR,
    )
    print("up", flush=True)
    sys.stdin.read()
    local.remember_processes()
    ray.shutdown()
finally:
    local.close()
"""


@pytest.fixture
def dashboard() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", HEAD, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        try:
            assert head.stdout.readline() == "up\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            head.stdin.close()
            assert head.wait(60) == 0


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON; 0 when nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def deploy(dashboard: str, config: dict[str, Any], folder: Path) -> None:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [str(BIN / "serve"), "deploy", "--address", dashboard, str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr


def actors() -> list[str]:
    """Of the engine, as processes."""
    names = ("ray::SchedulerActor", "ray::WorkerActor")
    return [line for line in processes_under(os.getpid()).values() if line.startswith(names)]


def test_the_cpu_overlay_answers_and_leaves_nothing(dashboard: str, tmp_path: Path) -> None:
    demo.pull("smollm2-135m")
    config = yaml.safe_load(yaml.safe_load(SERVE.read_text())["spec"]["serveConfigV2"])
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    config["http_options"] = {"host": "127.0.0.1", "port": free_port()}  # as the rest of this test: loopback alone
    config["applications"][0]["args"]["orphan_timeout_s"] = 1.0
    deploy(dashboard, config, tmp_path)

    url = f"http://127.0.0.1:{config['http_options']['port']}"
    deadline_s = time.monotonic() + 180
    while ask(f"{url}/ready")[0] != 200:
        assert time.monotonic() < deadline_s, subprocess.run(
            [str(BIN / "serve"), "status", "--address", dashboard], capture_output=True, text=True, timeout=60
        ).stdout
        time.sleep(0.5)
    question = [{"role": "user", "content": "What is the capital of Germany?"}]
    status, answer = ask(f"{url}/v1/chat/completions", {"messages": question, "temperature": 0, "max_tokens": 30})
    assert status == 200
    assert "Berlin" in answer["choices"][0]["message"]["content"]
    _, models = ask(f"{url}/v1/models")
    assert models["data"][0]["max_model_len"] == config["applications"][0]["args"]["max_model_len"]

    assert actors()
    deploy(dashboard, config | {"applications": []}, tmp_path)  # what was detached from the routers goes with them
    deadline_s = time.monotonic() + 60
    while actors():
        assert time.monotonic() < deadline_s, actors()
        time.sleep(0.5)

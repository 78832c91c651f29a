"""A Prometheus from Debian scrapes a live server, and every query of the dashboard has an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.local import free_port
from tests.cluster.live import LiveServer, users

DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = "a-key"


@pytest.fixture(scope="module")
def prometheus(
    make_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Scrapes a server under load every second, with its key."""
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    server = make_server(AppConfig(api_key=(KEY,)), parrot={"pace_s": 0.005})
    server.client.headers["authorization"] = f"Bearer {KEY}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": "orcaserve",
                "authorization": {"type": "Bearer", "credentials": KEY},
                "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with users(server, 3, KEY), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            _until(lambda: _value(client, "vllm:num_requests_running") > 0, (folder / "log").read_text)
            server.complete("x", n=0)  # refused
            refused = "sum(rate(orcaserve:requests_refused_total[10s]))"
            _until(lambda: _value(client, refused) > 0, (folder / "log").read_text)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _until(condition: Callable[[], bool], tell: Callable[[], str], within_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, tell()[-3000:]
        time.sleep(0.2)


def _value(client: httpx.Client, query: str) -> float:
    try:
        result = _query(client, query)
    except httpx.TransportError:  # it is still starting
        return 0.0
    return float(result[0]["value"][1]) if result else 0.0


def _query(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/query", params={"query": query})
    if answer.status_code == 503:
        return []
    body = answer.json()
    assert body["status"] == "success", (query, body)
    return body["data"]["result"]


def panels(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
        yield from panels(panel) if "panels" in panel else ()


DASHBOARD = list(panels(json.loads((DEPLOY / "grafana" / "orcaserve.json").read_text())))
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]


def test_every_query_of_the_dashboard_returns_data(prometheus: httpx.Client) -> None:
    assert len(DASHBOARD) > 20
    for title, expression in DASHBOARD:
        query = expression.replace("$__rate_interval", "10s")

        def has_data(query: str = query) -> bool:
            result = _query(prometheus, query)
            return bool(result) and all(series["value"][1] != "NaN" for series in result)

        _until(has_data, lambda title=title, query=query: f"{title}: {_query(prometheus, query)}")


def test_every_series_that_an_alert_looks_at_is_there(prometheus: httpx.Client) -> None:
    for rule in ALERTS:
        for selector in re.findall(r"(?:vllm|orcaserve):\w+(?:\{[^}]*\})?", rule["expr"]):
            _until(lambda s=selector: _query(prometheus, s) != [], lambda s=selector: s)
        expression, name = rule["expr"], rule["alert"]
        _until(lambda e=expression: _query(prometheus, e) == [], lambda n=name: n)  # all is well here


def test_rules_are_loaded_and_healthy(prometheus: httpx.Client) -> None:
    def health() -> dict[str, str]:
        [group] = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for rule in group["rules"]}

    _until(lambda: health() == {rule["alert"]: "ok" for rule in ALERTS}, lambda: str(health()))

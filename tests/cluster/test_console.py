"""The console as an operator uses it: in a browser, with and without load, on a desk and on a phone, and with a key."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orcaserve.cluster.app_config import AppConfig
from tests.cluster.browser import Browser
from tests.cluster.live import LiveServer, users

IS_READY = "document.getElementById('ready').textContent === 'ready'"
WATCH_FETCH = "sent = []; (send => { fetch = (url, how) => (sent.push(JSON.parse(how.body)), send(url, how)) })(fetch)"
ENTER, TAB = 13, 9


@pytest.mark.parametrize(("width", "dark", "num_users"), [(1280, False, 0), (390, True, 80)])
def test_the_page(
    make_server: Callable[..., LiveServer], tmp_path: Path, width: int, dark: bool, num_users: int
) -> None:
    """It shows the load, chats by keyboard alone, stays within the screen and complains about nothing."""
    server = make_server(parrot={"pace_s": 0.01})
    with Browser(width, dark=dark) as browser, users(server, num_users):
        browser.open(server.url + "/console")
        browser.until(IS_READY)
        if num_users:
            browser.until("+document.getElementById('running').textContent === 64")
            browser.until("+document.getElementById('waiting').textContent > 0")
            browser.until("+document.getElementById('generated').textContent > 0")
        else:
            assert browser.run("document.querySelector('.budgeted').textContent") == "No step yet"
        browser.run(WATCH_FETCH)
        for _ in range(10):  # slots and events can have the focus too
            browser.press("Tab", TAB)
            if browser.run("document.activeElement.id") == "say":
                break
        browser.type("SAY:Berlin it is.")
        browser.press("Enter", ENTER)
        browser.until("document.getElementById('talk').lastChild?.textContent === 'Berlin it is.'", 60)
        browser.until("document.querySelector('canvas.slots').getAttribute('aria-label').startsWith('Last step')")
        assert browser.run("sent.map(body => body.temperature)") == [0]
        assert painted(browser) > 0
        browser.until("document.getElementById('ttft_p99').textContent !== '–'")
        assert "group ready" in browser.run("document.getElementById('events').textContent")
        assert browser.run("document.documentElement.scrollWidth") == width
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(16, 21, 27)" if dark else "rgb(246, 247, 249)")
        browser.screenshot(tmp_path / "console.png")
        assert (tmp_path / "console.png").stat().st_size > 10_000
        assert browser.complaints == []
    server.until_idle()


def painted(browser: Browser) -> int:
    """Pixels of the slots' picture that some step has filled."""
    return browser.run(
        "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 == 3 && v).length)"
        "(document.querySelector('canvas.slots'))"
    )


def test_the_page_says_when_the_line_is_cut_and_comes_back(make_server: Callable[..., LiveServer]) -> None:
    server = make_server()
    with Browser() as browser:
        browser.open(server.url + "/console")
        browser.until(IS_READY)
        server.state = "dead"
        browser.until("document.getElementById('ready').textContent === 'not ready'")
        browser.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        server.state = "ready"
        browser.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        browser.until(IS_READY)


def test_the_key_is_asked_for_the_way_a_browser_understands(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(AppConfig(api_key=("a-key",)))
    refused = server.client.get("/console")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert server.client.get("/console/feed").status_code == 401
    assert server.client.get("/cluster").headers["www-authenticate"] == "Bearer"

    basic = {"authorization": "Basic " + base64.b64encode(b"anyone:a-key").decode()}
    for site, status in (("", 200), ("none", 200), ("same-origin", 200), ("same-site", 401), ("cross-site", 401)):
        fetch = {"sec-fetch-site": site} if site else {}
        assert server.client.get("/console", headers=basic | fetch).status_code == status, site
    for wrong in (b"anyone:b-key", b"a-key", b":", b"a-key:"):
        credentials = {"authorization": "Basic " + base64.b64encode(wrong).decode()}
        assert server.client.get("/console", headers=credentials).status_code == 401
    assert server.client.get("/console", headers={"authorization": "Basic !!"}).status_code == 401


def test_the_browser_gets_in_with_the_key(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(AppConfig(api_key=("a-key",)))
    with Browser() as browser:
        browser.open(server.url.replace("http://", "http://me:a-key@") + "/console")
        browser.until(IS_READY)
        browser.run("document.getElementById('say').focus()")
        browser.type("SAY:Come in.")
        browser.press("Enter", ENTER)
        browser.until("document.getElementById('talk').lastChild?.textContent === 'Come in.'")


def test_nothing_comes_from_elsewhere(server: LiveServer) -> None:
    page = server.client.get("/console")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_the_feed_costs_nothing_when_nobody_looks(make_server: Callable[..., LiveServer]) -> None:
    server = make_server()
    observer = server.service.observer
    server.complete("SAY:one two three")
    assert not server.call(lambda: list(observer._steps))
    with server.client.stream("GET", "/console/feed") as feed:
        lines = (line for line in feed.iter_lines() if line)
        json.loads(next(lines).removeprefix("data: "))
        server.complete("SAY:one two three")
        steps: list[dict[str, Any]] = []
        while not (any(step["prefill"] for step in steps) and any(step["decode"] for step in steps)):
            steps += json.loads(next(lines).removeprefix("data: "))["groups"][0]["steps"]
    assert [step["id"] for step in steps] == sorted({step["id"] for step in steps})
    assert {slot for step in steps for slot in step["decode"]} == {0}

"""Debian's Chromium without a window, told what to do over its DevTools pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    "--hide-scrollbars",  # a screenshot would be cut off by the width of one
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


class Browser:
    """One page. Use it with `with`; skips the test where there is no Chromium."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.skip("chromium is not installed")
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_it, self._to = os.pipe()
        self._from, from_it = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]

        def place_pipes() -> None:  # the browser reads commands on descriptor 3 and answers on 4
            os.dup2(to_it, 300)
            os.dup2(from_it, 301)
            os.dup2(300, 3)
            os.dup2(301, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=place_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_it)
        os.close(from_it)
        self._buffer = b""
        self._num_calls = 0
        self.complaints: list[str] = []  # exceptions and console errors of the page
        self._session = ""
        attached = self.call("Target.attachToTarget", targetId=self._first_page(), flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._receive()
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _first_page(self) -> str:
        deadline_s = time.monotonic() + 60
        while True:
            pages = [t["targetId"] for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
            if pages:
                return pages[0]
            assert time.monotonic() < deadline_s, "the browser has no page"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def until(self, condition: str, within_s: float = 90.0) -> None:
        """Wait for a JavaScript condition."""
        deadline_s = time.monotonic() + within_s
        while not self.run(condition):
            assert time.monotonic() < deadline_s, (
                f"{condition} did not come true; the page: {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser is gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])


OpenBrowser = Callable[..., Browser]

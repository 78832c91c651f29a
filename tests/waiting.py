"""Tests wait for what they need, not for a time that it usually takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Returns once the condition holds; fails when it does not come to hold in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)

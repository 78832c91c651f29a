"""One line in the log for every request: numbers and names, never the prompt unless the operator asks."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from orcaserve.cluster.auth import OPEN_PATHS

if TYPE_CHECKING:
    from orcaserve.cluster.app_edge import Call

logger = logging.getLogger("orcaserve.access")
_PROBES = OPEN_PATHS | {"/metrics", "/cluster"}  # asked every few seconds by machines: logged only when they fail


def log_request(call: Call, duration_s: float, *, as_json: bool) -> None:
    """After the last byte."""
    level = logging.DEBUG if call.path in _PROBES and call.status < 400 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": call.request_id,
        "method": call.method,
        "path": call.path[:200],
        "status": call.status or 499,  # 499: the client left before the answer began
        "duration_ms": round(duration_s * 1000, 2),
        "tenant": call.tenant.name,
        **call.notes,
    }
    if as_json:
        logger.log(level, "%s", msgspec.json.encode(line).decode())
    else:
        logger.log(level, "%s", " ".join(f"{key}={_plain(value)}" for key, value in line.items() if value != ""))


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else msgspec.json.encode(text).decode()

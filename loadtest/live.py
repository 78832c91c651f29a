"""Progress of a run in the terminal: requests sent, running, done and failed, and chunks a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from orcaserve.loadtest.run import Progress

REFRESH_S = 0.25


@contextlib.asynccontextmanager
async def shown(progress: Progress, console: Console, label: str) -> AsyncIterator[None]:
    """Draw `progress` while the block runs; nothing is drawn where the output is not a terminal."""
    if not console.is_terminal:
        yield
        return
    started = time.perf_counter()
    with Live(console=console, refresh_per_second=1 / REFRESH_S, transient=True) as live:

        async def redraw() -> None:
            last_chunks, last_at = 0, started
            while True:
                now = time.perf_counter()
                rate = (progress.chunks - last_chunks) / max(now - last_at, 1e-6)
                last_chunks, last_at = progress.chunks, now
                live.update(_table(progress, label, now - started, rate))
                await asyncio.sleep(REFRESH_S)

        task = asyncio.create_task(redraw())
        try:
            yield
        finally:
            task.cancel()


def _table(progress: Progress, label: str, elapsed_s: float, rate: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "elapsed", "sent", "in flight", "done", "failed", "chunks/s"):
        table.add_column(name, justify="left" if name == "run" else "right")
    failed = f"[red]{progress.failed}[/]" if progress.failed else "0"
    table.add_row(
        label,
        f"{elapsed_s:.0f} s",
        f"{progress.sent}/{progress.total}",
        str(progress.in_flight),
        str(progress.done),
        failed,
        f"{rate:,.0f}",
    )
    return table

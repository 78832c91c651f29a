"""Printing tables in the terminal; JSON goes to stdout as its last line, everything else to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from orcaserve.loadtest.http_stream import HttpFault
from orcaserve.loadtest.run import RunResult

console = Console(stderr=True)


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """The first row is the head; the first column is left-aligned."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def print_json(content: Any) -> None:
    """One line on stdout."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    sys.stdout.flush()


def print_run(result: RunResult) -> None:
    """The figures of one run that one wants to see at once."""
    s = result.summary
    rows = [
        [f"{result.label}: {s.completed} done, {s.failed} failed, {s.cancelled} cancelled", "mean", "p50", "p99", "max"]
    ]
    queue = s.queue_ms or result.server_queue_ms
    for name, stats in (("TTFT ms", s.ttft_ms), ("TPOT ms", s.tpot_ms), ("ITL ms", s.itl_ms), ("queue wait ms", queue)):
        if stats:
            rows.append(
                [name, *(f"{stats[key]:,.1f}" if key in stats else "" for key in ("mean", "p50", "p99", "max"))]
            )
    print_table(f"{s.output_throughput:,.1f} output tokens/s, {s.request_throughput:.2f} requests/s", rows)
    for error, count in s.errors.items():
        console.print(f"[red]{count} failed[/]: {error}")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Bad options, unreadable files and unreachable servers end the command with one line and code 2."""
    try:
        yield
    except* (ValueError, HttpFault, OSError) as group:
        for error in group.exceptions:
            console.print(f"[red]error[/]: {error}")
        raise typer.Exit(2) from None

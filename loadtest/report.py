"""Writes runs down: JSON for machines, one self-contained HTML page and PNGs for people."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orcaserve.loadtest import plots
from orcaserve.loadtest.metrics import Stats
from orcaserve.loadtest.run import RunResult

_STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
.scroll{overflow-x:auto}td,th{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
td:first-child,th:first-child{text-align:left}figure{margin:1rem 0}img{max-width:100%;border-radius:6px}
.bad{color:#dc2626;font-weight:600}.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:1rem}
@media(max-width:560px){.grid{grid-template-columns:1fr}}
"""


def write_json(results: Sequence[RunResult], path: Path) -> None:
    """All runs with every request's record, so that a later comparison can recompute anything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(results)), indent=1))


def read_json(path: Path) -> list[RunResult]:
    """What `write_json` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[RunResult])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: not a load-test result: {error}") from error


def pictures(results: Sequence[RunResult]) -> dict[str, bytes]:
    """File stem -> PNG, only those that the runs have data for."""
    drawn: dict[str, bytes | None] = {f"{m}_cdf": plots.latency_cdf(results, m) for m in ("ttft", "itl", "e2e")}
    drawn["throughput"] = plots.throughput_over_time(results)
    drawn["in_flight"] = plots.requests_in_flight(results)
    if len(results) > 1:
        drawn["load"] = plots.load_curve(results)
    drawn["timeline"] = plots.timeline(results[-1])
    return {name: data for name, data in drawn.items() if data is not None}


def write(results: Sequence[RunResult], folder: Path, title: str) -> Path:
    """results.json, report.html and the PNGs in `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(results, folder / "results.json")
    images = pictures(results)
    for name, data in images.items():
        (folder / f"{name}.png").write_bytes(data)
    tables = [_summary_table(results), _latency_table(results), _errors(results)]
    return write_page(folder / "report.html", title, tables, images)


def write_page(path: Path, title: str, sections: Sequence[str], images: dict[str, bytes]) -> Path:
    """One HTML file that needs nothing beside it: the pictures are inside."""
    figures = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'
        for name, data in images.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f'{"".join(sections)}<div class="grid">{figures}</div></html>',
        encoding="utf-8",
    )
    return path


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first column is the row's name."""
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{html.escape(heading)}</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _summary_table(results: Sequence[RunResult]) -> str:
    columns = (
        "run",
        "load",
        "completed",
        "failed",
        "cancelled",
        "duration s",
        "requests/s",
        "output tok/s",
        "goodput/s",
        "SLO kept",
    )
    rows = []
    for result in results:
        s = result.summary
        counts = (s.completed, s.failed, s.cancelled)
        rates = (f"{s.duration_s:.1f}", f"{s.request_throughput:.2f}", f"{s.output_throughput:.1f}", f"{s.goodput:.2f}")
        rows.append((result.label, result.arrivals, *map(str, counts), *rates, f"{s.slo_attainment:.1%}"))
    return table("Runs", columns, rows)


def _latency_table(results: Sequence[RunResult]) -> str:
    rows = []
    for result in results:
        s = result.summary
        queue = s.queue_ms or result.server_queue_ms
        named = (("TTFT", s.ttft_ms), ("ITL", s.itl_ms), ("TPOT", s.tpot_ms), ("E2E", s.e2e_ms), ("queue wait", queue))
        rows += [
            (f"{result.label} {name}", *_cells(stats)) for name, stats in (*named, ("send lag", s.send_lag_ms)) if stats
        ]
    return table("Latencies, milliseconds", ("", "mean", "p50", "p90", "p95", "p99", "max"), rows)


def _cells(stats: Stats) -> list[str]:
    return [f"{stats[key]:.2f}" if key in stats else "" for key in ("mean", "p50", "p90", "p95", "p99", "max")]


def _errors(results: Sequence[RunResult]) -> str:
    faults = [(r.label, error, str(n)) for r in results for error, n in r.summary.errors.items()]
    return table("Failures", ("run", "error", "requests"), faults) if faults else ""

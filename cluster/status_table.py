"""`/cluster` for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from orcaserve.cluster.protocol_responses import ClusterStatusResponse

_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}


class StatusTable:
    """Remembers the last status, for rates."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, int] | None = None  # when, tokens generated so far

    def of(self, status: ClusterStatusResponse) -> Group:
        """One line about the service, one for each group, and why groups died."""
        errors = [Text(f"group {group.group_id}: {group.error}", style="red") for group in status.groups if group.error]
        return Group(self._headline(status), self._groups(status), *errors)

    def _headline(self, status: ClusterStatusResponse) -> Text:
        stats = status.scheduler
        word = "draining" if status.draining else "ready" if status.ready else "not ready"
        routers = f"{status.num_routers} router{'' if status.num_routers == 1 else 's'}"
        parts = [f"{stats['running']} running", f"{stats['waiting']} waiting", routers]
        parts.append(f"up {status.uptime_s:.0f} s")
        now_s, generated = self._clock(), stats["generation_tokens"]
        if self._last is not None and now_s > self._last[0]:
            parts.append(f"{max(0, generated - self._last[1]) / (now_s - self._last[0]):.0f} tokens/s")
        self._last = now_s, generated
        for tenant, count in sorted(stats["waiting_by_tenant"].items()):
            parts.append(f"{tenant or 'no tenant'} waits {count}")
        return Text.assemble((word, "bold green" if status.ready else "bold yellow"), "  ", ", ".join(parts))

    def _groups(self, status: ClusterStatusResponse) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for place, name in enumerate(("group", "state", "node", "ranks", "running", "KV used", "cached", "step ms")):
            table.add_column(name, justify="left" if place < 3 else "right")
        figures = {group["group_id"]: group for group in status.scheduler["groups"]}
        for group in status.groups:
            state = f"{group.state} ({group.phase})" if group.phase else group.state
            nodes = ",".join(sorted({node[:8] for node in group.node_ids}))
            ranks = str(len(group.node_ids))
            row: list[str | Text] = [str(group.group_id), Text(state, style=_STYLES[group.state]), nodes, ranks]
            if (now := figures.get(group.group_id)) is None:
                table.add_row(*row, "", "", "", "")
                continue
            total = now["total_blocks"]
            running = f"{now['running']}/{now['num_slots']}"
            shares = [f"{100 * now[kind] / total:.0f}%" for kind in ("used_blocks", "cached_blocks")]
            table.add_row(*row, running, *shares, f"{1000 * now['step_s']:.1f}")
        return table

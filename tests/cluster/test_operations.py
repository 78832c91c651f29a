"""What operators do from a terminal with a service that runs: status, chat, trace; and a node that leaves."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orcaserve.cli import main
from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.step_trace import GROUPS, SCHEDULER, StepTrace
from orcaserve.cluster.wire import RankStep, StepSeen, StepTimes
from tests.cluster.live import LiveServer, users
from tests.waiting import eventually

KEY = "a-key"


@pytest.fixture(scope="module")
def guarded(make_server: Callable[..., LiveServer]) -> LiveServer:
    server = make_server(AppConfig(api_key=(KEY,)), parrot={"pace_s": 0.005})
    server.client.headers["authorization"] = f"Bearer {KEY}"
    return server


@pytest.fixture
def orcaserve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["orcaserve", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_status(orcaserve: Callable[..., tuple[int, str, str]], guarded: LiveServer) -> None:
    where = ("--url", guarded.url, "--api-key", KEY)
    code, table, _ = orcaserve("status", *where)
    assert code == 0
    assert table.startswith("ready  0 running, 0 waiting, 1 router, up ")
    assert "0/64" in table
    code, line, _ = orcaserve("status", "--json", *where)
    assert (code, json.loads(line)["scheduler"]["waiting"]) == (0, 0)


def test_chat(orcaserve: Callable[..., tuple[int, str, str]], guarded: LiveServer, monkeypatch: Any) -> None:
    where = ("--url", guarded.url, "--api-key", KEY, "--max-tokens", "100")
    assert orcaserve("chat", "--message", "SAY:Hello there.", *where) == (0, "Hello there.\n", "")
    lines = iter(["SAY:one", "", "SAY:two"])

    def typed(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    assert orcaserve("chat", *where)[:2] == (0, "one\ntwo\n")
    code, out, err = orcaserve("chat", "--message", "SAY:", *where)
    assert (code, out.strip()) == (1, "")
    assert err == "orcaserve: error: the answer is empty\n"


def test_bad_usage_and_bad_luck_are_one_line(
    orcaserve: Callable[..., tuple[int, str, str]], guarded: LiveServer, tmp_path: Path
) -> None:
    for arguments, expected in (
        (("status", "--url", "nowhere"), 1),
        (("status", "--url", "http://127.0.0.1:9"), 1),
        (("status", "--url", guarded.url), 1),
        (("trace",), 2),
        (("trace", "-o", str(tmp_path / "no" / "step.json")), 2),
        (("trace", "-o", str(tmp_path / "step.json"), "--seconds", "-1"), 2),
        (("chat", "--max-tokens", "0"), 2),
        (("drain", "--timeout", "soon"), 2),
    ):
        code, out, err = orcaserve(*arguments)
        assert (code, out, err.count("\n")) == (expected, "", 1), (arguments, err)


def test_a_trace_tells_what_happened(
    orcaserve: Callable[..., tuple[int, str, str]], guarded: LiveServer, tmp_path: Path
) -> None:
    """Every step is planned, sent, computed, received and published, in this order, one after the other on each row."""
    file = tmp_path / "step.json"
    with users(guarded, 2, KEY):
        eventually(lambda: guarded.load[0] > 0)
        where = ("--url", guarded.url, "--api-key", KEY)
        assert orcaserve("trace", "--seconds", "3", "-o", str(file), *where)[0] == 0
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in slices:
        if event["name"] not in ("forward", "sample"):
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01, (one, other)
    plans = {e["args"]["step"]: e for e in slices if e["name"] == "plan"}
    received = {e["args"]["step"]: e for e in slices if e["name"] == "receive"}
    steps = {e["args"]["step"]: e for e in slices if e["pid"] == GROUPS and e["name"].startswith("step")}
    assert len(steps) > 20
    for number, step in steps.items():
        assert plans[number]["ts"] + plans[number]["dur"] <= step["ts"]
        assert step["ts"] + step["dur"] <= received[number]["ts"]
        assert step["dur"] >= 5000  # the parrot's pace
    starts, ends = ({e["id"] for e in events if e["ph"] == kind} for kind in "sf")
    assert ends <= starts


def test_a_rank_on_another_machine_has_another_clock() -> None:
    """1000 s ahead: its steps are moved to where they must have been."""
    trace = StepTrace()
    for number in range(3):
        at_s = 10.0 + number
        times = StepTimes(at_s, at_s + 0.1, at_s + 0.2, at_s + 0.9, at_s + 0.91, at_s + 0.92, 0.4, 0.1)
        trace._steps[0, number] = StepSeen(number, 0, number, 0.7, [(0, 4)], b"", times)
        for rank in range(2):
            trace._rank_steps.append(RankStep(number, 0, rank, number, at_s + 1000.3, at_s + 1000.8))
    slices = [event for event in trace.chrome()["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if event["pid"] == GROUPS and event["name"].startswith("step")]
    assert len(steps) == 6
    for step in steps:
        plan = 1e6 * step["args"]["step"]
        assert plan + 1e5 <= step["ts"]
        assert step["ts"] + step["dur"] <= plan + 1e6
    assert {event["name"] for event in slices if event["pid"] == SCHEDULER} >= {"plan", "send", "receive", "publish"}


def test_a_trace_wants_sensible_seconds(guarded: LiveServer) -> None:
    for wrong in ("0", "-1", "61", "nan", "soon"):
        answer = guarded.client.get("/trace", params={"seconds": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds"), wrong


def test_a_router_whose_node_leaves_is_not_ready_but_finishes(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.01})
    body = {"prompt": "x", "stream": True, "max_tokens": 100, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        server.worker.gate.clear()
        server.call(lambda: server.service.leave_node("elsewhere"))
        assert server.client.get("/ready").status_code == 200
        server.call(lambda: server.service.leave_node(""))  # the node of this test's router
        eventually(lambda: server.client.get("/ready").status_code == 503)
        assert server.call(lambda: server.service.num_open_on("")) == 1
        server.worker.gate.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    eventually(lambda: server.call(lambda: server.service.num_open_on("")) == 0)

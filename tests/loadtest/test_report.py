"""Reports and comparisons: what is written can be read again, pages stand alone, ratios are within rounds."""

import asyncio
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orcaserve.loadtest import report, server_metrics
from orcaserve.loadtest.cli import loadtest_app, simulate_app
from orcaserve.loadtest.compare import as_table, compare, in_turns
from orcaserve.loadtest.metrics import NO_SLO, RequestRecord, summarize
from orcaserve.loadtest.run import RunResult


def result(label: str, tpot_s: float, n: int = 12) -> RunResult:
    records = []
    for i in range(n):
        times = [i * 0.1 + 0.05 + k * tpot_s for k in range(5)]
        records.append(RequestRecord(i, i * 0.1, i * 0.1, times[0], times[-1], times, 10, 5, status="ok"))
    records.append(RequestRecord(n, 0.0, 0.0, end_s=1.0, error="HTTP 503: busy"))
    return RunResult(label, "m", "closed loop, 4 users", "now", summarize(records, NO_SLO), records)


def test_a_report_stands_alone_and_can_be_read_again(tmp_path: Path) -> None:
    results = [result("one <b>", 0.01), result("two", 0.02)]
    page = report.write(results, tmp_path, "Load & test")
    text = page.read_text()
    assert "Load &amp; test" in text
    assert "one &lt;b&gt;" in text
    assert "HTTP 503: busy" in text
    assert text.count("data:image/png;base64,") == 7
    assert "http://" not in text
    assert 'src="data:' in text
    images = sorted(p.name for p in tmp_path.glob("*.png"))
    assert images == sorted(
        f"{n}.png" for n in ("ttft_cdf", "itl_cdf", "e2e_cdf", "throughput", "in_flight", "load", "timeline")
    )
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in tmp_path.glob("*.png"))
    again = report.read_json(tmp_path / "results.json")
    assert again == results


def test_a_run_in_which_all_failed_has_a_report_too(tmp_path: Path) -> None:
    failed = [RequestRecord(0, 0.0, 0.0, end_s=1.0, error="x")]
    run = RunResult("r", "m", "all at once", "now", summarize(failed, NO_SLO), failed)
    assert report.write([run], tmp_path, "t").is_file()


def test_unreadable_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json"):
        report.read_json(tmp_path / "x.json")


def test_ratios_are_taken_within_rounds() -> None:
    drifting = [[result("a", 0.01 * k) for k in (1, 2, 4)], [result("b", 0.03 * k) for k in (1, 2, 4)]]
    found = {c.figure: c for c in compare(drifting)}
    tpot = found["TPOT mean ms"]
    assert tpot.ratios == pytest.approx([1.0, 3.0])
    assert tpot.spread[1] == pytest.approx((3.0, 3.0))
    assert tpot.values == pytest.approx([20.0, 60.0])
    assert "3.00x" in as_table(["a", "b"], list(found.values()))[list(found).index("TPOT mean ms") + 1][-1]


def test_a_comparison_needs_two_sides() -> None:
    with pytest.raises(ValueError, match="two sides"):
        compare([[result("a", 0.01)]])


def test_turns_alternate() -> None:
    order: list[str] = []

    def side(name: str):
        async def run(number: int) -> RunResult:
            order.append(f"{name}{number}")
            return result(name, 0.01)

        return run

    results = asyncio.run(in_turns([side("a"), side("b")], 3))
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert [r.label for r in results[1]] == ["b", "b", "b"]


METRICS = """# HELP vllm:request_queue_time_seconds x
vllm:request_queue_time_seconds_bucket{{le="0.1",model="m"}} {a}
vllm:request_queue_time_seconds_bucket{{le="1.0",model="m"}} {b}
vllm:request_queue_time_seconds_bucket{{le="+Inf",model="m"}} {b}
vllm:request_queue_time_seconds_sum{{model="m"}} {total}
vllm:request_queue_time_seconds_count{{model="m"}} {b}
vllm:num_preemptions_total{{model="m"}} {p}
"""


def test_queue_wait_comes_from_the_servers_histogram() -> None:
    before = server_metrics.parse(METRICS.format(a=10, b=20, total=5.0, p=1))
    after = server_metrics.parse(METRICS.format(a=60, b=120, total=25.0, p=4))
    stats = server_metrics.queue_stats_ms(before, after)
    assert stats["mean"] == pytest.approx(200)
    assert stats["p50"] == pytest.approx(100)  # half of the hundred waited up to 0.1 s
    assert stats["p99"] == pytest.approx(100 + 900 * 49 / 50)
    assert server_metrics.counters(before, after) == {"vllm:num_preemptions_total": 3.0}
    assert server_metrics.queue_stats_ms(after, after) == {}


runner = CliRunner()


def test_run_and_compare_commands(make_peer, tmp_path: Path) -> None:
    fast, slow = make_peer(gap_s=0.001), make_peer(gap_s=0.01)
    done = runner.invoke(
        loadtest_app,
        [
            "run",
            fast.url,
            "-n",
            "6",
            "--concurrency",
            "1,3",
            "--lengths",
            "fixed:8,4",
            "--warm-up",
            "2",
            "-o",
            str(tmp_path),
        ],
    )
    assert done.exit_code == 0, done.output
    assert len(report.read_json(tmp_path / "results.json")) == 2
    assert len(fast.bodies) == 16  # two runs of six, each after two to warm up
    assert len({tuple(body["prompt"]) for body in fast.bodies}) == 16  # no run finds another's prompts in a cache
    done = runner.invoke(
        loadtest_app,
        [
            "compare",
            fast.url,
            slow.url,
            "-n",
            "4",
            "--lengths",
            "fixed:8,16",
            "--rounds",
            "2",
            "-o",
            str(tmp_path / "c"),
        ],
    )
    assert done.exit_code == 0, done.output
    saved = [str(tmp_path / "c" / f"{side}.json") for side in "ab"]
    assert runner.invoke(loadtest_app, ["compare", *saved]).exit_code == 0
    assert runner.invoke(loadtest_app, ["report", *saved, "-o", str(tmp_path / "r")]).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere"],
        ["run", "http://127.0.0.1:9", "--lengths", "fixed:0,0"],
        ["run", "http://127.0.0.1:9", "--concurrency", "1", "--rate", "1"],
        ["run", "http://127.0.0.1:9", "--concurrency", "x"],
        ["run", "http://127.0.0.1:9", "--slo", "fast"],
        ["run", "http://127.0.0.1:9", "-n", "1"],
        ["compare", "a.json", "http://127.0.0.1:9"],
        ["compare", "a.json", "b.json"],
        ["report", "a.json"],
        ["run", "http://127.0.0.1:9", "--think", "nan"],
        ["run", "http://127.0.0.1:9", "--burstiness", "0"],
        ["run", "http://127.0.0.1:9", "--warm-up", "-1"],
        ["run", "http://127.0.0.1:9", "--trace", __file__, "--tokenizer", "nowhere"],
        ["table", "--model", "nowhere"],
        ["table", "--num-threads", "-1"],
    ],
)
def test_bad_options_end_with_one_line_and_code_2(arguments, tmp_path: Path) -> None:
    assert_refused(loadtest_app, [*arguments, "-o", str(tmp_path)])


@pytest.mark.parametrize(
    ("app", "arguments"),
    [
        (loadtest_app, ["chaos", "--model", "nowhere"]),
        (loadtest_app, ["chaos", "--every", "nan"]),
        (loadtest_app, ["chaos", "--nodes", "-1"]),
        (loadtest_app, ["start", "--idle-s", "inf"]),
        (loadtest_app, ["stack", "--step-ms", "nan"]),
        (simulate_app, ["plan", "--rate", "nan"]),
        (simulate_app, ["plan", "--rate", "5", "--attainment", "2"]),
        (simulate_app, ["plan", "--rate", "5", "--gpu-memory-utilization", "7"]),
        (simulate_app, ["day", "--start-s", "nan"]),
        (simulate_app, ["day", "--hours", "0"]),
        (simulate_app, ["day", "--min-groups", "5", "--max-groups", "2"]),
    ],
)
def test_bad_options_of_what_leaves_no_folder(app: typer.Typer, arguments: list[str]) -> None:
    assert_refused(app, arguments)


def assert_refused(app: typer.Typer, arguments: list[str]) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert "error" in done.output.lower()
    assert "Traceback" not in done.output


def test_simulate_commands(tmp_path: Path) -> None:
    shown = runner.invoke(simulate_app, ["--trace"])
    assert shown.exit_code == 0
    assert "13 steps, 160 prompt tokens, 26 output tokens" in shown.output
    table = runner.invoke(simulate_app, ["table", "-n", "60", "--users", "12", "-o", str(tmp_path / "t")])
    assert table.exit_code == 0, table.output
    assert (tmp_path / "t" / "study.html").is_file()
    plan = ["plan", "--rate", "4", "-n", "60", "--tp", "4", "--processes", "1", "-o", str(tmp_path / "p")]
    planned = runner.invoke(simulate_app, plan)
    assert planned.exit_code == 0, planned.output
    assert '"best":{"tensor_parallel_size":4,"groups":1,"gpus":4}' in planned.output
    assert (tmp_path / "p" / "plan.png").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "--gpu", "abacus"],
        ["table", "--model", "x"],
        ["plan"],
        ["plan", "--rate", "1", "--tp", "0"],
        ["table", "--tensor-parallel-size", "1"],
    ],
)
def test_bad_simulations_are_refused(arguments, tmp_path: Path) -> None:
    done = runner.invoke(simulate_app, [*arguments, "-o", str(tmp_path)])
    assert done.exit_code == 2
    assert "error" in done.output

"""The performance table: ratios within rounds, aims in both directions, servers really loaded in turns."""

import pytest

from orcaserve.loadtest import bench
from orcaserve.loadtest.bench import Aim, BenchRow, as_table, cached_prefix_row, in_turns, load, served_rows
from orcaserve.loadtest.http_stream import ServerFailed


@pytest.mark.parametrize(
    ("aim", "ratio", "met"),
    [
        (Aim(1.5, True), 1.5, True),
        (Aim(1.5, True), 1.4, False),
        (Aim(0.6, False), 0.6, True),
        (Aim(0.6, False), 0.7, False),
    ],
)
def test_aims_look_the_right_way(aim: Aim, ratio: float, met: bool) -> None:
    assert aim.met(ratio) is met


def test_two_servers_in_turns(make_peer, monkeypatch) -> None:
    monkeypatch.setattr(bench, "OUTPUT_TOKENS", 4)
    fast, slow = make_peer(gap_s=0.001), make_peer(gap_s=0.03)
    seen: list[str] = []
    runs = in_turns([fast.url, slow.url], 2, lambda result: seen.append(result.label))
    assert seen == [fast.url, slow.url] * 3 + [slow.url, fast.url] * 3
    prompts = [tuple(body["prompt"]) for body in fast.bodies]
    assert len(set(prompts)) == len(prompts)
    rows = {row.measure: row for row in served_rows(runs, "slow one")}
    tpot = rows["TPOT ms, 1 in flight"]
    assert tpot.ratio is not None
    assert tpot.other is not None
    assert tpot.ratio == pytest.approx(tpot.ours / tpot.other, rel=0.01)
    assert tpot.met is (tpot.ratio <= 0.6)
    assert len(as_table(list(rows.values()))) == 5


def test_only_the_wanted_loads_are_run(make_peer, monkeypatch) -> None:
    monkeypatch.setattr(bench, "OUTPUT_TOKENS", 2)
    peer = make_peer(gap_s=0.001)
    runs = in_turns([peer.url], 2, lambda _result: None, (16,))
    assert {users: [len(of_server) for of_server in of_users] for users, of_users in runs.items()} == {16: [2]}
    assert len(peer.bodies) == 3 * 48  # the warm-up and two rounds


def test_without_a_peer_there_is_no_ratio(make_peer, monkeypatch) -> None:
    monkeypatch.setattr(bench, "OUTPUT_TOKENS", 2)
    rows = served_rows(in_turns([make_peer(gap_s=0.002).url], 1, lambda _result: None), "")
    assert {(row.ratio, row.met) for row in rows} == {(None, None)}
    assert all(row.ours > 0 for row in rows)


def test_known_prompts_are_the_ones_that_came_before(make_peer) -> None:
    peer = make_peer(gap_s=0.001)
    row = cached_prefix_row(peer.url)
    prompts = [body["prompt"] for body in peer.bodies]
    assert prompts[:7] == prompts[7:]
    assert len({tuple(prompt) for prompt in prompts}) == 7
    assert {len(prompt) for prompt in prompts} == {1000}
    assert row.ratio == row.ours / row.other


def test_a_run_with_failures_gives_no_figures(make_peer) -> None:
    with pytest.raises(ServerFailed, match="requests failed"):
        load(make_peer(fail_every=3).url, 4, seed=0)


def test_the_table_prints_what_was_met() -> None:
    rows = [BenchRow("a", 3.0, 2.0, "peer", 1.5, ">= 1.5x", True), BenchRow("b", 1.0, None, "", None, "", None)]
    assert [line[-1] for line in as_table(rows)] == ["met", "yes", ""]

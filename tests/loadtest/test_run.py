"""The generator against a real HTTP peer whose timing is known."""

import asyncio

import numpy as np
import pytest

from orcaserve.loadtest import workload
from orcaserve.loadtest.arrivals import Arrivals, ClosedLoop, constant
from orcaserve.loadtest.run import Generator, Progress, RunConfig, RunResult
from orcaserve.loadtest.workload import BadWorkload, LoadRequest, WorkloadSpec


def drive(url: str, requests: list[LoadRequest], arrivals: Arrivals, **config) -> RunResult:
    generator = Generator(RunConfig(base_url=url, **config), Progress(len(requests)))
    return asyncio.run(generator.run(requests, arrivals))


def some(n: int, prompt: int = 20, output: int = 8, **spec) -> list[LoadRequest]:
    return workload.build(WorkloadSpec(n, workload.fixed(prompt, output), **spec))


def test_tokens_are_counted_by_usage_and_times_are_the_peers(make_peer) -> None:
    peer = make_peer(first_delay_s=0.05, gap_s=0.02, tokens_per_chunk=3)
    result = drive(peer.url, some(6, output=9), ClosedLoop(1))
    s = result.summary
    assert (s.completed, s.failed, s.output_tokens, s.prompt_tokens, s.cached_tokens) == (6, 0, 54, 120, 6)
    late_s: list[float] = []
    for record, writes in zip(result.records, peer.writes_s, strict=True):
        assert len(record.chunk_times_s) == 3  # nine tokens in three chunks
        assert record.ttft_s >= 0.05
        late_s += np.abs(np.diff(record.chunk_times_s) - np.diff(writes)).tolist()
        assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 8)
    assert np.median(late_s) < 0.2  # one clock on both sides; single ones may be late on a busy machine
    assert result.model == "tiny"


def test_closed_loop_keeps_as_many_in_flight_as_there_are_users(make_peer) -> None:
    peer = make_peer(first_delay_s=0.02)
    result = drive(peer.url, some(12), ClosedLoop(3), api="chat")
    moments = sorted([(r.sent_s, 1) for r in result.records] + [(r.end_s, -1) for r in result.records])
    assert max(np.cumsum([step for _, step in moments])) == 3
    assert all(len(body["messages"][0]["content"].split()) == 20 for body in peer.bodies)


def test_open_loop_sends_when_due(make_peer) -> None:
    peer = make_peer(first_delay_s=2.0)
    result = drive(peer.url, some(10), constant(10, 50.0))
    assert [r.due_s for r in result.records] == pytest.approx([i / 50 for i in range(10)])
    assert all(r.sent_s >= r.due_s for r in result.records)
    assert result.records[9].sent_s < result.records[0].end_s  # it did not wait for answers


def test_prompts_are_the_same_for_the_same_seed_and_share_their_prefix(make_peer) -> None:
    peer = make_peer()
    requests = some(6, num_prefixes=1, prefix_tokens=16)
    drive(peer.url, requests, ClosedLoop(1), seed=3)
    drive(peer.url, requests, ClosedLoop(1), seed=3)
    prompts = [body["prompt"] for body in peer.bodies]
    assert prompts[:6] == prompts[6:]
    assert len({tuple(p[:16]) for p in prompts}) == 1
    assert len({tuple(p[16:]) for p in prompts[:6]}) == 6
    assert {len(p) for p in prompts} == {36}


def test_a_conversation_carries_the_answers_it_got(make_peer) -> None:
    peer = make_peer()
    result = drive(peer.url, some(6, turns=3), ClosedLoop(2), api="chat")
    assert result.summary.completed == 6
    lengths = sorted(len(body["messages"]) for body in peer.bodies)
    assert lengths == [1, 1, 3, 3, 5, 5]
    longest = max(peer.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [m["role"] for m in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == "word " * 8


def test_conversations_need_the_chat_api(make_peer) -> None:
    with pytest.raises(BadWorkload, match="api=chat"):
        drive(make_peer().url, some(4, turns=2), ClosedLoop(1))


def test_cancelled_requests_hang_up_and_are_counted_apart(make_peer) -> None:
    peer = make_peer(gap_s=0.02)
    result = drive(peer.url, some(8, output=50, cancel_share=1.0), ClosedLoop(8))
    assert (result.summary.cancelled, result.summary.completed, result.summary.failed) == (8, 0, 0)
    for record in result.records:
        assert record.output_tokens == len(record.chunk_times_s) < 50


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"fail_every": 1}, "HTTP 503: busy"),
        ({"fault": "truncate"}, "before the response was complete"),
        ({"fault": "error-event"}, "error event: worker died"),
        ({"fault": "no-usage"}, "no usage"),
    ],
)
def test_failures_are_counted_with_their_reason(make_peer, knobs, message) -> None:
    peer = make_peer(**knobs)
    result = drive(peer.url, some(3), ClosedLoop(1))
    assert result.summary.failed == 3
    assert result.summary.completed == 0
    assert all(message in error for error in result.summary.errors)
    assert result.summary.goodput == 0


def test_a_request_past_its_time_limit_has_failed(make_peer) -> None:
    result = drive(make_peer(first_delay_s=5.0).url, some(2), ClosedLoop(2), timeout_s=0.1)
    assert result.summary.errors == {"no end within 0.1 s": 2}


def test_nobody_listening_is_a_failure_not_a_crash() -> None:
    result = drive("http://127.0.0.1:9", some(2), ClosedLoop(1), model="m")
    assert result.summary.failed == 2

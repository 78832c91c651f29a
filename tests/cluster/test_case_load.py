"""The cases of faults.jsonl about too much at once, and about clients that leave, against live servers."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from orcaserve.cluster.app_config import AppConfig
from tests.cluster.live import LiveServer
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def test_case_29_bodies_over_the_limit(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(AppConfig(max_body_bytes=100_000))
    assert server.complete("x" * 200_000).status_code == 413

    def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 10_000

    response = server.client.post(TEXT, content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert server.complete("SAY:x").status_code == 200


def test_case_29_bodies_that_trickle_in(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(AppConfig(body_timeout_s=0.2))
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.settimeout(30)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_case_29_compressed_bodies_are_refused(server: LiveServer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert server.client.post(TEXT, content=b"x", headers=headers).status_code == 415


def test_case_29_big_prompts_do_not_block_the_loop(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered while a prompt is in the tokenizer."""
    codec = server.surface.codec
    encode_now, answered = codec.encode_now, []

    def encode_beside_others(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        answered.append(httpx.get(server.url + "/health", timeout=60).status_code)
        return encode_now(texts, add_special_tokens)

    monkeypatch.setattr(codec, "encode_now", encode_beside_others)
    fits = "word " * (codec.longest_token_chars * 512 // 5 - 10)  # as long as a prompt may be before it is tokenised
    for prompt in ("x" * 3_900_000, "y " * 3_500_000, fits, fits, fits):
        response = server.complete(prompt, max_tokens=1)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    assert answered == [200] * 3  # the first two are refused before they are tokenised


def test_case_20_closed_connections_free_everything(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.005})
    endless = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    for _ in range(10):
        with server.client.stream("POST", TEXT, json=endless | {"stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=endless, timeout=0.1)
    server.until_idle()
    server.worker.gate.clear()  # now it stays in the queue, or in its prefill
    for body in (endless, endless | {"stream": True}, endless | {"prompt": "y " * 100, "max_tokens": 200}):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=body, timeout=0.1)
    server.worker.gate.set()
    server.until_idle()


def test_case_21_cancelled_at_any_moment(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.002})
    rng = random.Random(0)

    async def storm() -> None:
        async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=None)) as client:

            async def one() -> None:
                body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.5}
                request = asyncio.create_task(client.post(TEXT, json=body))
                await asyncio.sleep(rng.random() * 0.05)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

            for _ in range(5):
                await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(storm())
    server.until_idle()
    assert server.complete("SAY:fine").json()["choices"][0]["text"] == "fine"


def test_case_28_a_full_queue_is_a_429(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(max_queued_requests=2, max_num_seqs=2)
    server.worker.gate.clear()
    statuses: list[tuple[int, str | None]] = []

    def send() -> None:
        response = httpx.post(
            server.url + TEXT, json={"prompt": "Count:", "max_tokens": 30, "ignore_eos": True}, timeout=120
        )
        statuses.append((response.status_code, response.headers.get("retry-after")))

    threads = [threading.Thread(target=send) for _ in range(16)]
    for number, thread in enumerate(threads):
        thread.start()
        if number < 4:  # two run, two wait
            eventually(lambda n=number: sum(server.load[:2]) == n + 1)  # type: ignore[misc]
    eventually(lambda: len(statuses) == 12)
    server.worker.gate.set()
    for thread in threads:
        thread.join(120)
    assert sorted(status for status, _ in statuses) == [200] * 4 + [429] * 12
    assert all(retry is not None and int(retry) >= 1 for status, retry in statuses if status == 429)
    server.until_idle()
    assert server.complete("SAY:x").status_code == 200


def test_case_24_health_and_readiness(make_server: Callable[..., LiveServer]) -> None:
    server = make_server()
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.state = "dead"
    for path in ("/health", "/ready"):
        response = server.client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["type"] == "server_error"
    server.state = "ready"
    assert server.client.get("/ready").status_code == 200


def test_case_31_metrics_agree_with_usage(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.005})
    usages = [server.complete(f"SAY:{text}").json()["usage"] for text in ("one", "one two", "one two three")]
    for _ in range(5):
        with server.client.stream(
            "POST", TEXT, json={"prompt": "x", "stream": True, "max_tokens": 300, "ignore_eos": True}
        ) as r:
            next(r.iter_lines())
    server.complete("x", n=0)
    server.until_idle()

    def samples() -> dict[str, float]:
        text = server.client.get("/metrics").text
        pairs = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    name = server.model.name
    eventually(lambda: samples().get(f'vllm:request_success_total{{finished_reason="abort",model_name="{name}"}}') == 5)
    found = samples()
    assert found[f'vllm:request_success_total{{finished_reason="stop",model_name="{name}"}}'] == 3
    assert found[f'vllm:num_requests_running{{model_name="{name}"}}'] == 0
    assert found[f'vllm:prompt_tokens_total{{model_name="{name}"}}'] == sum(u["prompt_tokens"] for u in usages) + 5
    assert (
        found[f'vllm:generation_tokens_total{{model_name="{name}"}}'] >= sum(u["completion_tokens"] for u in usages) + 5
    )
    assert found[f'orcaserve:requests_refused_total{{code="invalid_request",model_name="{name}"}}'] == 1
    assert not any("cmpl-" in key for key in found)


def test_case_31_figures_that_make_no_sense_do_no_harm(server: LiveServer) -> None:
    metrics = server.surface.metrics
    for value in (-3, float("nan"), float("-inf")):
        metrics.generated(value, value)  # type: ignore[arg-type]
        metrics.first_token(value, value)
        metrics.next_token(value)
        metrics.request_ended("/v1/completions", 200, value)
    assert b"nan" not in metrics.render(None).lower()


def test_case_38_memory_stays_where_it_is(server: LiveServer) -> None:
    server.complete("hi", n=5_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for fields in ({"n": 5_000_000}, {"best_of": 1_000_000}, {"n": 128, "best_of": 10_000_000}):
        assert server.complete("hi", **fields).status_code == 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_deadlines(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(max_num_seqs=1, parrot={"pace_s": 0.02})
    with server.client.stream(
        "POST", TEXT, json={"prompt": "x", "stream": True, "max_tokens": 300, "ignore_eos": True}
    ) as one:
        lines = one.iter_lines()
        assert next(lines)
        response = server.complete("y", deadline_ms=50)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    server.until_idle()


def test_the_queue_has_its_own_timeout(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(max_num_seqs=1, queue_timeout_s=0.05, parrot={"pace_s": 0.02})
    body = {"prompt": "x", "stream": True, "max_tokens": 300, "ignore_eos": True}
    with server.client.stream("POST", TEXT, json=body) as one:
        lines = one.iter_lines()
        assert next(lines)
        response = server.complete("y")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
    assert response.headers["retry-after"] == "1"


def test_unknown_routes_and_methods(server: LiveServer) -> None:
    assert server.client.get("/nope").json()["error"]["code"] == "not_found"
    wrong = server.client.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")

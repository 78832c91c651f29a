"""Streams that are cut at any byte go on where they stopped: the client has the ids, the server the rest."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orcaserve import AsyncClient, Client
from orcaserve.cluster.client_retry import RetryPolicy
from tests.cluster.live import LiveServer
from tests.waiting import eventually

SAID = "one two three four five six seven"
HI = [{"role": "user", "content": f"SAY:{SAID}"}]
QUICK = RetryPolicy(max_retries=3, first_delay_s=0.001, max_delay_s=0.002)


class CuttingProxy:
    """Passes bytes to the live server and back, and cuts each connection after so many bytes of its answer.

    An answer that is shorter (a slow reader gets several tokens in one chunk) is cut before its end mark.
    """

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._cuts = cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            cut = self._cuts[self.num_connections] if self.num_connections < len(self._cuts) else None
            self.num_connections += 1
            threading.Thread(target=self._pass, args=(client, cut), daemon=True).start()

    def _pass(self, client: socket.socket, cut: int | None) -> None:
        with client, socket.create_connection(self._target) as upstream:

            def forth() -> None:
                try:
                    while data := client.recv(65536):
                        upstream.sendall(data)
                    upstream.shutdown(socket.SHUT_WR)
                except OSError:
                    pass

            threading.Thread(target=forth, daemon=True).start()
            num_passed = 0
            try:
                while data := upstream.recv(4096):
                    end = data.find(b"data: [DONE]")
                    if cut is not None and (end >= 0 or num_passed + len(data) >= cut):
                        client.sendall(data[: cut - num_passed if end < 0 else min(end, cut - num_passed)])
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    num_passed += len(data)
                    client.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def server(make_server: Callable[..., LiveServer]) -> LiveServer:
    return make_server(parrot={"pace_s": 0.002})  # so slow that tokens go out one by one


@pytest.fixture
def cutting(server: LiveServer) -> Iterator[Callable[..., CuttingProxy]]:
    proxies: list[CuttingProxy] = []

    def make(*cuts: int) -> CuttingProxy:
        proxies.append(CuttingProxy(server.url, list(cuts)))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


def collect(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    usage = None
    ids, opened = set(), []
    for each in stream:
        ids.add(each.id)
        for choice in each.choices:
            assert choice.index not in finishes
            opened += [choice.index] if choice.delta.role is not None else []
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                finishes[choice.index] = choice.finish_reason
            assert choice.token_ids is None
        usage = each.usage or usage
    assert len(ids) == 1
    assert sorted(opened) == sorted(set(opened))
    return texts, finishes, usage


CUTS = [(500,), (700, 900, 1200), (1000, 1000, 1000, 1000), (1900,), (2600,), (1500, 800), (50,), (300, 300)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("options", [{}, {"stop": ["three four nine", "six seven"]}, {"n": 2}, {"max_tokens": 5}])
def test_a_cut_stream_goes_on_without_loss_or_repetition(
    server: LiveServer, cutting: Callable[..., CuttingProxy], cuts: tuple[int, ...], options: dict[str, Any]
) -> None:
    options = options | {"temperature": 0, "stream_options": {"include_usage": True}}
    with Client(server.url) as client:
        want = collect(client.stream_chat(HI, **options))
    proxy = cutting(*cuts)
    with Client(proxy.url, retry=QUICK) as client:
        got = collect(client.stream_chat(HI, resume=True, **options))
    assert got[:2] == want[:2]
    assert got[2].completion_tokens == want[2].completion_tokens
    assert got[2].prompt_tokens == want[2].prompt_tokens
    assert proxy.num_connections > 1
    server.until_idle()


def test_a_cut_stream_goes_on_for_asyncio_too(server: LiveServer, cutting: Callable[..., CuttingProxy]) -> None:
    async def run() -> str:
        async with AsyncClient(cutting(800, 900).url, retry=QUICK) as client:
            return "".join(
                [text async for text in client.stream_complete("SAY:" + SAID, resume=True, max_tokens=30).text]
            )

    assert asyncio.run(run()) == SAID


def test_an_error_of_the_server_is_resumed_too(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.02})
    with Client(server.url, retry=QUICK) as client:
        stream = client.stream_chat(HI, resume=True)
        texts = [next(stream).text for _ in range(3)]
        server.worker.fail = "a fault"
        eventually(lambda: server.load[0] == 0)
        server.worker.fail = ""
        texts += [each.text for each in stream]
    assert "".join(texts) == SAID


def test_resume_tokens_that_make_no_sense(server: LiveServer) -> None:
    for ids in ({}, {"1": [5]}, {"x": [5]}, {"0": [49152]}, {"0": [5] * 600}, {"0": "x"}, [1]):
        response = server.complete("x", resume_token_ids=ids, max_tokens=500)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "resume_token_ids"


def test_resumed_by_hand(server: LiveServer) -> None:
    first = server.complete("SAY:" + SAID, max_tokens=3, return_token_ids=True).json()["choices"][0]
    rest = server.complete("SAY:" + SAID, max_tokens=30, resume_token_ids={"0": first["token_ids"]}).json()
    assert first["text"] + rest["choices"][0]["text"] == SAID
    assert rest["usage"]["completion_tokens"] == 8
    ended = server.complete("SAY:" + SAID, max_tokens=30, return_token_ids=True).json()["choices"][0]["token_ids"]
    again = server.complete("SAY:" + SAID, max_tokens=30, resume_token_ids={"0": ended}).json()
    assert again["choices"][0]["text"] == ""
    assert again["choices"][0]["finish_reason"] == "stop"
    assert again["usage"]["completion_tokens"] == 8

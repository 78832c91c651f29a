"""Channels between real processes and threads: what gets through, what does not, and who learns of an end."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from orcaserve.cluster import channel
from orcaserve.cluster.channel import BlockingClient, ChannelClosed, Client, Endpoint, Peer, Server


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    number: int
    padding: bytes = b""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    number: int


Message = Ping | Pong

ECHO = """
import sys, msgspec
from orcaserve.cluster.channel import BlockingClient, Endpoint
class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    number: int
    padding: bytes = b""
link = BlockingClient(msgspec.json.decode(sys.stdin.readline(), type=Endpoint), Ping)
link.send(Ping(0))
while True:
    link.send(link.recv())
"""


class Side:
    """A server that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[Peer, Any]] = []
        self.lost: list[Peer] = []
        self.server: Server[Any] = Server("127.0.0.1", Message, lambda *m: self.got.append(m), self.lost.append)  # type: ignore[arg-type]

    @property
    def port(self) -> int:
        return int(self.server.endpoint.address.rpartition(":")[2])

    @asynccontextmanager
    async def process(self) -> AsyncIterator[subprocess.Popen[str]]:
        child = subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, text=True)
        try:
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(self.server.endpoint).decode() + "\n")
            child.stdin.flush()
            await until(lambda: len(self.got) > 0)
            yield child
        finally:
            child.kill()
            child.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Side], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        side = Side()
        try:
            async with asyncio.timeout(120):
                await test(side)
        finally:
            side.server.close()

    asyncio.run(whole())


def test_everything_arrives_in_order() -> None:
    async def test(side: Side) -> None:
        back: list[Any] = []
        client: Client[Any] = Client(side.server.endpoint, Message, back.append, lambda: None)  # type: ignore[arg-type]
        for i in range(3000):
            assert client.send(Ping(i, b"x" * (i % 500)))
        await until(lambda: len(side.got) == 3000)
        assert [m.number for _, m in side.got] == list(range(3000))
        [peer] = side.server.peers
        for i in range(3000):
            assert side.server.send(peer, Pong(i))
        await until(lambda: len(back) == 3000)
        assert back == [Pong(i) for i in range(3000)]
        client.close()
        await until(lambda: side.lost == [peer])
        assert not side.server.send(peer, Pong(1))

    run(test)


def test_bad_bytes_are_dropped_and_counted() -> None:
    async def test(side: Side) -> None:
        client: Client[Any] = Client(side.server.endpoint, Message, lambda _: None, lambda: None)  # type: ignore[arg-type]
        for junk in (b"", b"\xff\xfe", os.urandom(1024), msgspec.msgpack.encode(["ping", "seven"]), pickle.dumps(Side)):
            client._socket.send(junk)
        client.send(Ping(7))
        await until(lambda: len(side.got) == 1)
        assert side.got[0][1] == Ping(7)
        assert side.server.num_dropped == 5
        client.close()

    run(test)


def test_strangers_are_not_let_in() -> None:
    async def test(side: Side) -> None:
        lost = asyncio.Event()
        forged = Endpoint(side.server.endpoint.address, side.server.endpoint.server_key, *zmq.curve_keypair())
        stranger: Client[Any] = Client(forged, Message, lambda _: None, lost.set)  # type: ignore[arg-type]
        stranger.send(Ping(1))
        await asyncio.wait_for(lost.wait(), 30)
        plain = zmq.Context.instance().socket(zmq.DEALER)
        plain.connect(side.server.endpoint.address)
        plain.send(msgspec.msgpack.encode(Ping(2)))
        with socket.create_connection(("127.0.0.1", side.port)) as raw:
            raw.sendall(os.urandom(1024))
        await until(lambda: side.server.num_refused >= 2)
        plain.close(0)
        member: Client[Any] = Client(side.server.endpoint, Message, lambda _: None, lambda: None)  # type: ignore[arg-type]
        member.send(Ping(3))
        await until(lambda: len(side.got) > 0)
        assert [m for _, m in side.got] == [Ping(3)]
        member.close()

    run(test)


def test_listens_on_the_address_it_was_given_alone() -> None:
    async def test(side: Side) -> None:
        listening = subprocess.run(["ss", "-ltnH", f"sport = :{side.port}"], capture_output=True, text=True, check=True)
        assert listening.stdout.split()[3] == f"127.0.0.1:{side.port}"

    run(test)


def test_a_killed_process_is_noticed_by_its_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_INTERVAL_MS", 3_600_000)
    monkeypatch.setattr(channel, "HEARTBEAT_TIMEOUT_MS", 3_600_000)

    async def test(side: Side) -> None:
        async with side.process() as child:
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: len(side.lost) == 1)

    run(test)


def test_a_stopped_process_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_INTERVAL_MS", 200)
    monkeypatch.setattr(channel, "HEARTBEAT_TIMEOUT_MS", 1500)

    async def test(side: Side) -> None:
        async with side.process() as child:
            os.kill(child.pid, signal.SIGSTOP)
            await until(lambda: len(side.lost) == 1)

    run(test)


def test_a_peer_that_was_hopelessly_behind_learns_that_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One side alone would not do: it wakes up, hears nothing more, and takes the line for a good one."""
    monkeypatch.setattr(channel, "MAX_UNSENT_MESSAGES", 8)

    async def test(side: Side) -> None:
        async with side.process() as child:
            [peer] = side.server.peers
            os.kill(child.pid, signal.SIGSTOP)
            while side.server.send(peer, Ping(1, b"x" * 2**20)):
                await asyncio.sleep(0)
            assert not side.server.send(peer, Ping(2))
            await until(lambda: side.lost == [peer])
            assert side.server.peers == []
            os.kill(child.pid, signal.SIGCONT)
            await until(lambda: child.poll() is not None)  # ended by ChannelClosed
            assert len(side.lost) == 1

    run(test)


def test_a_callback_that_raises_holds_up_no_other_message() -> None:
    async def test(_side: Side) -> None:
        bugs: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context["exception"]))
        got: list[bytes] = []

        def take(frames: list[zmq.Frame]) -> None:
            got.append(frames[0].bytes)
            raise RuntimeError("a bug")

        with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
            here.bind("inproc://test")
            there.connect("inproc://test")
            for number in range(3):  # all are there before the first is looked at, so they signal once
                there.send(bytes([number]))
            inbox = channel._Inbox(here, take)
            await until(lambda: len(got) == 3)
            inbox.close()
        assert got == [b"\0", b"\1", b"\2"]
        assert [str(bug) for bug in bugs] == ["a bug"] * 3

    run(test)


def test_a_client_whose_last_message_raises_still_learns_of_the_end() -> None:
    async def test(side: Side) -> None:
        bugs: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: bugs.append(context["exception"]))
        lost = asyncio.Event()

        def take(_: Any) -> None:
            raise RuntimeError("a bug")

        client: Client[Any] = Client(side.server.endpoint, Message, take, lost.set)  # type: ignore[arg-type]
        client.send(Ping(1))
        await until(lambda: len(side.got) == 1)
        loop.remove_reader(client._inbox._fd)  # it reads when it hears of the end, as it does now and then anyhow
        side.server.send(side.server.peers[0], Pong(1))
        side.server.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert [str(bug) for bug in bugs] == ["a bug"]

    run(test)


def test_a_descriptor_used_again_is_another_peer() -> None:
    async def test(side: Side) -> None:
        for i in range(20):
            client: Client[Any] = Client(side.server.endpoint, Message, lambda _: None, lambda: None)  # type: ignore[arg-type]
            client.send(Ping(i))
            await until(lambda i=i: len(side.got) == i + 1)
            client.close(linger_ms=0)
        await until(lambda: len(side.lost) == 20)
        assert side.lost == [peer for peer, _ in side.got]
        assert side.server.peers == []

    run(test)


def test_clients_learn_of_the_servers_end_after_reading_all() -> None:
    async def test(side: Side) -> None:
        lost = asyncio.Event()
        back: list[Any] = []
        client: Client[Any] = Client(side.server.endpoint, Message, back.append, lost.set)  # type: ignore[arg-type]
        client.send(Ping(1))
        await until(lambda: len(side.got) == 1)
        side.server.send(side.server.peers[0], Pong(9))
        side.server.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert back == [Pong(9)]
        assert not client.send(Ping(2))

    run(test)


def test_a_thread_reads_all_before_it_is_told_of_the_end() -> None:
    async def test(side: Side) -> None:
        read: list[Any] = []
        failure: list[BaseException] = []

        def serve() -> None:
            link: BlockingClient[Any] = BlockingClient(side.server.endpoint, Message)  # type: ignore[arg-type]
            link.send(Ping(1))
            try:
                while True:
                    read.append(link.recv())
            except ChannelClosed as closed:
                failure.append(closed)
            finally:
                link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        await until(lambda: len(side.got) == 1)
        for i in range(50):
            side.server.send(side.server.peers[0], Pong(i))
        side.server.close()
        await asyncio.to_thread(thread.join, 30)
        assert read == [Pong(i) for i in range(50)]
        assert len(failure) == 1

    run(test)


def test_an_end_is_not_held_up_by_a_peer_that_goes_at_the_same_moment() -> None:
    """Without a linger time on the listening socket one round in some 300 never ended."""

    async def once() -> None:
        side = Side()
        client: Client[Any] = Client(side.server.endpoint, Message, lambda _: None, lambda: None)  # type: ignore[arg-type]
        client.send(Ping(0))
        await until(lambda: len(side.got) == 1)
        client.close()
        side.server.send(side.got[0][0], Pong(1))
        side.server.close()

    async def often() -> None:
        for _ in range(500):
            await once()

    thread = threading.Thread(target=lambda: asyncio.run(often()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_keys_do_not_show() -> None:
    endpoint = Endpoint("tcp://127.0.0.1:1", b"server", b"public", b"secret")
    assert "secret" not in f"{endpoint} {endpoint!r}"


def test_nobody_there() -> None:
    async def test(side: Side) -> None:
        there = side.server.endpoint
        lost = asyncio.Event()
        nowhere = Endpoint("tcp://127.0.0.1:1", there.server_key, there.client_public_key, there.client_secret_key)
        Client(nowhere, Message, lambda _: None, lost.set)  # type: ignore[arg-type,var-annotated]
        await asyncio.wait_for(lost.wait(), 30)

    run(test)

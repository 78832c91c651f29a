"""Encrypted message channels between processes: ZeroMQ with CURVE, msgpack inside, nothing that can run code.

One side is a `Server` (the scheduler), the others are `Client`s on an event loop or a `BlockingClient` in a thread (a
worker's step loop). A connection lives once: when it breaks, both ends learn it and neither heals it in secret, so
that whoever used it can say again what the other side may have missed. A peer that stops answering (stopped process,
dead host) is found by ZeroMQ's heartbeats, which run outside of Python.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from socket import AF_INET, SHUT_RDWR, SOCK_STREAM, fromfd
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

In = TypeVar("In")
Peer = bytes  # the name under which a server knows a client

# A process that dies closes its connection, which is noticed at once; this is for one that is stopped, or a host that
# is gone. Threads of processes that were only short of a core have been silent for more than 4 s.
HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 12_000
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_UNSENT_MESSAGES = 4096  # per peer; one that lets more pile up is taken for dead
LINGER_MS = 200  # how long what was sent before a close may take to leave
_BATCH = 128  # messages handled before the event loop gets a turn
_CLIENT_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ChannelClosed(Exception):
    """The other end is gone; nothing more will come."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens and the key that it lets in. Whoever holds one may talk to the server."""

    address: str
    server_key: bytes
    client_public_key: bytes
    client_secret_key: bytes

    def __repr__(self) -> str:
        return f"Endpoint({self.address})"  # keys stay out of logs


class Server(Generic[In]):
    """The listening side. Callbacks run on the event loop and must not block."""

    def __init__(
        self,
        host: str,
        message_type: Any,  # a Struct or a union of them
        on_message: Callable[[Peer, In], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self.num_dropped = 0  # messages that could not be decoded
        self.num_refused = 0  # connections without the right key
        self._fd_of: dict[Peer, int] = {}
        self._peer_at: dict[int, Peer] = {}
        self._hung_up: set[Peer] = set()  # by us; their event is still to come
        self._known_lost: dict[int, int] = {}  # descriptor -> disconnections that were noticed before their event came

        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        self._allowed_key = z85.decode(client_key)
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)  # answers libzmq's question "may this key come in?"
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        self._socket.zap_domain = b"orcaserve"
        self._socket.router_mandatory = True
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED_HANDSHAKES)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = Endpoint(f"tcp://{host}:{port}", server_key, client_key, client_secret)

        self._inboxes = [
            _Inbox(self._zap, self._authenticate),
            _Inbox(self._monitor, self._on_event),
            _Inbox(self._socket, self._on_frames),
        ]
        self._inbox = self._inboxes[-1]

    @property
    def peers(self) -> list[Peer]:
        return list(self._fd_of)

    def send(self, peer: Peer, message: msgspec.Struct) -> bool:
        """False when the peer is gone (or hopelessly behind): `on_lost` is called for it, once."""
        if peer not in self._fd_of or peer in self._hung_up:
            return False
        try:
            self._socket.send_multipart((peer, self._encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self._hang_up(peer)
            elif error.errno != zmq.EHOSTUNREACH:  # its event is on the way
                raise
            return False
        finally:
            self._inbox.wake()  # sending may have swallowed the wake-up of a message that came in meanwhile
        return True

    def close(self) -> None:
        if self._socket.closed:
            return
        for inbox in self._inboxes:
            inbox.close()
        self._fd_of.clear()
        self._peer_at.clear()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._zap.close(0)
        self._context.term()

    def _authenticate(self, frames: list[zmq.Frame]) -> None:
        version, request_id, _domain, _address, _identity, mechanism, *credentials = [f.bytes for f in frames]
        welcome = mechanism == b"CURVE" and credentials == [self._allowed_key]
        status = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        self._zap.send_multipart((version, request_id, *status, b"", b""))
        self._inboxes[0].wake()

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            message = self._decoder.decode(frames[-1].buffer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.num_dropped += 1
            logger.debug("dropped %d bytes that are no message of ours: %s", len(frames[-1].buffer), error)
            return
        if peer not in self._fd_of:
            self._meet(peer, int(frames[-1].get(zmq.SRCFD)))
        self._on_message(peer, message)

    def _meet(self, peer: Peer, fd: int) -> None:
        if (former := self._peer_at.get(fd)) is not None:  # its descriptor is in use again, so it must be gone
            self._known_lost[fd] = self._known_lost.get(fd, 0) + 1
            self._lose(former)
        self._fd_of[peer] = fd
        self._peer_at[fd] = peer

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([f.bytes for f in frames])
        if event["event"] & _REFUSED_HANDSHAKES:
            self.num_refused += 1
            return
        self._inbox.drain()  # what the peer had said before it went
        fd = int(event["value"])
        if self._known_lost.get(fd, 0) > 0:
            self._known_lost[fd] -= 1
        elif (peer := self._peer_at.get(fd)) is not None:
            self._lose(peer)

    def _hang_up(self, peer: Peer) -> None:
        """On the connection itself, so that the peer, too, learns of it: one that was only stopped wakes up again."""
        self._hung_up.add(peer)
        with suppress(OSError), fromfd(self._fd_of[peer], AF_INET, SOCK_STREAM) as connection:
            connection.shutdown(SHUT_RDWR)

    def _lose(self, peer: Peer) -> None:
        if (fd := self._fd_of.pop(peer, None)) is None:
            return
        del self._peer_at[fd]
        self._hung_up.discard(peer)
        self._on_lost(peer)


class Client(Generic[In]):
    """The connecting side on an event loop. `on_lost` comes at most once; after that the object is of no more use."""

    def __init__(
        self,
        endpoint: Endpoint,
        message_type: Any,  # a Struct or a union of them
        on_message: Callable[[In], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self.num_dropped = 0
        self.alive = True
        self._context, self._socket, self._monitor = _connect(endpoint)
        self._inboxes = [_Inbox(self._monitor, self._on_event), _Inbox(self._socket, self._on_frames)]
        self._inbox = self._inboxes[-1]

    def send(self, message: msgspec.Struct) -> bool:
        """False when the connection is gone; what was sent just before a loss may not have arrived either."""
        if not self.alive:
            return False
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            asyncio.get_running_loop().call_soon(self._lose)
            return False
        self._inbox.wake()
        return True

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Messages already sent get `linger_ms` to leave."""
        if self.alive:
            self.alive = False
            for inbox in self._inboxes:
                inbox.close()
            _disconnect(self._context, self._socket, self._monitor, linger_ms)

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        try:
            message = self._decoder.decode(frames[-1].buffer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.num_dropped += 1
            logger.debug("dropped %d bytes that are no message of ours: %s", len(frames[-1].buffer), error)
            return
        self._on_message(message)

    def _on_event(self, _frames: list[zmq.Frame]) -> None:
        try:
            self._inbox.drain()  # what the server had said before it went
        finally:
            self._lose()

    def _lose(self) -> None:
        if self.alive:
            self.close(linger_ms=0)
            self._on_lost()


class BlockingClient(Generic[In]):
    """The connecting side for a thread of its own, which waits for messages and works on them one by one."""

    def __init__(self, endpoint: Endpoint, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self.num_dropped = 0
        self._context, self._socket, self._monitor = _connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def recv(self) -> In:
        """Wait for the next message. Raises ChannelClosed once the other end is gone and all it sent is read."""
        while True:
            ready = dict(self._poller.poll())
            if self._socket in ready:
                try:
                    return self._decoder.decode(self._socket.recv())
                except (msgspec.DecodeError, msgspec.ValidationError):
                    self.num_dropped += 1
                    continue
            raise ChannelClosed

    def send(self, message: msgspec.Struct) -> None:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelClosed from error

    def close(self) -> None:
        _disconnect(self._context, self._socket, self._monitor)


class _Inbox:
    """Hands a ZeroMQ socket's messages to a callback, from the running event loop, without a task or a future each."""

    def __init__(self, socket: zmq.Socket, on_frames: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._awake = False
        self._loop.add_reader(self._fd, self._handle_some)
        self.wake()

    def wake(self) -> None:
        """Look again soon: the descriptor signals changes only, and a send may have consumed one."""
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._handle_some)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)

    def drain(self) -> None:
        """Handle everything that is there, now."""
        while self._open and self._handle_one():
            pass

    def _handle_some(self) -> None:
        self._awake = False
        for _ in range(_BATCH):
            if not self._open or not self._handle_one():
                return
        self.wake()

    def _handle_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            self._on_frames(frames)
        except Exception:
            self.wake()  # the next messages may have been signalled already
            raise
        return True


def _connect(endpoint: Endpoint) -> tuple[zmq.Context, zmq.Socket, zmq.Socket]:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        _set_limits(socket)
        socket.identity = uuid.uuid4().hex.encode()
        socket.curve_serverkey = endpoint.server_key
        socket.curve_publickey = endpoint.client_public_key
        socket.curve_secretkey = endpoint.client_secret_key
        socket.reconnect_ivl = 24 * 3600 * 1000  # never; "never" itself (-1) would throw away what has arrived unread
        monitor = socket.get_monitor_socket(_CLIENT_ENDS)
        socket.connect(endpoint.address)
    except zmq.ZMQError:
        context.destroy(0)  # descriptors may be what was missing
        raise
    return context, socket, monitor


def _disconnect(context: zmq.Context, socket: zmq.Socket, monitor: zmq.Socket, linger_ms: int = LINGER_MS) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(linger_ms)
    context.term()


def _set_limits(socket: zmq.Socket) -> None:
    # Before bind: connections that are let in take it from there, whatever close() says later, and without it a
    # message to a peer that is just going would hold up the context's end for ever.
    socket.linger = LINGER_MS
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.sndhwm = MAX_UNSENT_MESSAGES
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.handshake_ivl = 10_000

"""The streaming HTTP client: any cut of the bytes gives the same events; hang-ups and faults are told apart."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orcaserve.loadtest.http_stream import EventSplitter, HttpFault, ResponseParser, StreamClient

EVENTS = [b'{"a": 1}', "日本語 🧪".encode(), b"x" * 300, b"[DONE]"]


def _response(events: list[bytes], newline: bytes) -> bytes:
    body = b": ping" + newline * 2 + b"data:" + newline * 2
    body += b"".join(b"data: " + e + newline * 2 for e in events)
    chunks = b"".join(f"{len(c):x}\r\n".encode() + c + b"\r\n" for c in (body[:37], body[37:41], body[41:]))
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n\r\n"
    )


@given(cuts=st.lists(st.integers(0, 800), max_size=30), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_any_cut_of_the_bytes_gives_the_same_events(cuts: list[int], newline: bytes) -> None:
    whole = _response(EVENTS, newline)
    ends = sorted({min(c, len(whole)) for c in cuts} | {len(whole)})
    parser, splitter, seen, start = ResponseParser(), EventSplitter(), [], 0
    for end in ends:
        seen += splitter.feed(parser.feed(whole[start:end]))
        start = end
    assert seen == EVENTS
    assert parser.done
    assert parser.keep_alive


def test_counted_body_and_body_until_close() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nab") == b"ab"
    assert not parser.done
    assert parser.feed(b"cde") == b"cde"
    assert (parser.done, parser.status) == (True, 503)

    until_close = ResponseParser()
    assert until_close.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    until_close.feed_eof()
    assert until_close.done
    assert not until_close.keep_alive


@pytest.mark.parametrize("start", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http_is_refused(start: bytes) -> None:
    with pytest.raises(HttpFault, match="status line"):
        ResponseParser().feed(start)


def test_eof_inside_a_body_is_a_fault() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab")
    with pytest.raises(HttpFault, match="before the response was complete"):
        parser.feed_eof()


def test_connections_are_reused_and_a_stale_one_is_replaced(make_peer) -> None:
    peer = make_peer(close_after_response=True)
    body = json.dumps({"max_tokens": 3, "prompt": [1, 2]}).encode()

    async def twice() -> list[int]:
        client = StreamClient(peer.url)
        statuses = [(await client.post("/v1/completions", body, lambda _d, _t: True))[0] for _ in range(5)]
        client.close()
        return statuses

    assert asyncio.run(twice()) == [200] * 5


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://"])
def test_bad_base_url_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        StreamClient(url)

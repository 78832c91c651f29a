"""Server-sent events from bytes (WHATWG HTML, section 9.2), without any I/O."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """`event` is "message" where the server did not name it."""

    event: str
    data: str


class SseParser:
    """Feed whatever bytes have come; characters and lines may be cut anywhere."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._text = ""
        self._after_cr = False
        self._name = ""
        self._data: list[str] = []
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that these bytes complete. Comments and events without data are skipped."""
        for line in self._lines(self._decode(chunk)):
            if line:
                self._field(line)
            elif event := self._dispatch():
                yield event

    def _lines(self, text: str) -> list[str]:
        """Lines end with LF, CR or CR LF; the LF may come in the next chunk."""
        if self._at_start and text:
            text = text.removeprefix("\ufeff")
            self._at_start = False
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        *lines, self._text = (self._text + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return lines

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value

    def _dispatch(self) -> Event | None:
        data, name = "\n".join(self._data), self._name or "message"
        self._data, self._name = [], ""
        return Event(name, data) if data else None

"""What a router asks the scheduler and waits to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from orcaserve.cluster.wire import AskStatus, AskView, ClusterStatus, FromRouter, View
from orcaserve.engine.errors import Unavailable


class Questions:
    """Those that are not answered yet, by number."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0

    async def ask(
        self, send: Callable[[FromRouter], None], question: Callable[[int], AskStatus | AskView], timeout_s: float
    ) -> Any:
        """The answer to `question` of a number of its own. Raises Unavailable when there is none in time."""
        self._num_asked += 1
        call_id = self._num_asked
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[call_id] = reply
        try:
            send(question(call_id))
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise Unavailable("the scheduler does not answer", retry_after_s=1.0) from None
        finally:
            del self._replies[call_id]

    def answer(self, call_id: int, answer: ClusterStatus | View) -> None:
        if (reply := self._replies.get(call_id)) is not None and not reply.done():
            reply.set_result(answer)

    def give_up(self, reason: str) -> None:
        """Nobody will answer any more."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(Unavailable(reason, retry_after_s=1.0))

"""One request's deltas, as its reader gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from orcaserve.cluster.stream_held import Held
from orcaserve.engine.messages import TokenDelta


class Deltas(AsyncIterator[TokenDelta]):
    """The deltas of one request, over all its choices, each until its finish reason. `aclose` aborts what is left."""

    def __init__(self, held: Held, forget: Callable[[Held], None], forget_choice: Callable[[Held, int], None]) -> None:
        self._held = held
        self._forget = forget
        self._forget_choice = forget_choice

    async def __anext__(self) -> TokenDelta:
        held = self._held
        while not held.arrived:
            if held.done:
                raise StopAsyncIteration
            held.reader = asyncio.get_running_loop().create_future()
            try:
                await held.reader
            finally:
                held.reader = None
        return held.arrived.popleft()

    def abort(self, choice_index: int) -> None:
        """Nothing more of this choice; the others go on."""
        self._forget_choice(self._held, choice_index)

    async def aclose(self) -> None:
        self._forget(self._held)

    def __del__(self) -> None:
        self._forget(self._held)

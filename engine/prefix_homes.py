"""Which groups hold the start of a prompt: a hint that spares asking every group's index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

MAX_KEYS = 65_536
NOWHERE: dict[int, None] = {}


class PrefixHomes:
    """First-block key -> groups that published such a block, most recently used keys kept.

    A hint may be stale (the block was evicted, the group is gone): whoever asks checks with the group.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, dict[int, None]] = OrderedDict()

    def add(self, key: bytes, group_id: int) -> None:
        homes = self._homes.get(key)
        if homes is None:
            homes = self._homes[key] = {}
            if len(self._homes) > MAX_KEYS:
                self._homes.popitem(last=False)
        else:
            self._homes.move_to_end(key)
        homes[group_id] = None

    def find(self, key: bytes) -> Mapping[int, None]:
        """Groups that may hold it."""
        return self._homes.get(key, NOWHERE)

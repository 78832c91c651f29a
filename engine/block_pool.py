"""The KV blocks of one group: reference counts, the index of cached contents, and the free list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class BlockPool:
    """Every block is used (refcount > 0), free and blank, or free and cached (its content can still be found).

    Blank blocks are handed out first, then the cached one that has been free for the longest. All calls are O(1) a
    block whatever the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and findable, longest free first
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A block of one's own. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._keys[block]
            assert key is not None, f"cached block {block} has no key"
            del self._index[key]
            self._keys[block] = None
        self._ref_counts[block] = 1
        return block

    def find(self, key: bytes) -> int | None:
        """The block with this content, used or free; take it with `share` before anything else is allocated."""
        return self._index.get(key)

    def is_free(self, block: int) -> bool:
        return self._ref_counts[block] == 0

    def share(self, block: int) -> None:
        """One more user of a used block or of a cached free one."""
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One user less of each. A request's blocks go last one first, so that a prefix is evicted from its end."""
        counts = self._ref_counts
        for block in blocks:
            left = counts[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            counts[block] = left
            if left == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Make a used block's content findable. The first block with a content keeps the name."""
        assert self._ref_counts[block] > 0, f"block {block} published while free"
        if key not in self._index and self._keys[block] is None:
            self._index[key] = block
            self._keys[block] = key

    def restore(self, contents: Mapping[int, bytes]) -> None:
        """Blank blocks, of which it turns out that they hold this: cached ones from now on, the first evicted first."""
        self._blank = [block for block in self._blank if block not in contents]
        for block, key in contents.items():
            self._cached[block] = None
            self._index[key] = block
            self._keys[block] = key

    def forget(self) -> None:
        """Empty the index: cached free blocks become blank, used ones lose their names."""
        for block in self._cached:
            self._blank.append(block)
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_blocks

    def check_invariants(self) -> None:
        free = set(self._blank) | set(self._cached)
        assert len(free) == len(self._blank) + len(self._cached), "a block is in the free list twice"
        for block, count in enumerate(self._ref_counts):
            assert (count == 0) == (block in free), f"block {block}: refcount {count}, free: {block in free}"
            key = self._keys[block]
            if key is None:
                assert block not in self._cached, f"cached block {block} has no key"
            else:
                assert self._index.get(key) == block, f"block {block} is not where the index says"
        for block in self._blank:
            assert self._keys[block] is None, f"blank block {block} has a key"
        named = sum(key is not None for key in self._keys)
        assert named == len(self._index), f"{named} named blocks, {len(self._index)} names"

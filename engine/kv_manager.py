"""Block tables of the requests of one group: who gets which blocks, what is shared, what can be found again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from orcaserve.engine.block_pool import BlockPool
from orcaserve.engine.messages import SlotKv
from orcaserve.engine.prefix import PrefixKeys
from orcaserve.engine.request import Request
from orcaserve.engine.saved_kv import SavedKv


class KVManager:
    """Copy on write: a block with more than one user is full of known tokens and is never written."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float,
        caching: bool,
        on_prefix: Callable[[bytes], None],
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.watermark_blocks = math.ceil(watermark * num_blocks)
        self.caching = caching
        self._on_prefix = on_prefix  # hears of each first block that becomes findable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Leading blocks of the request's known tokens that the pool holds, never all tokens: the last is computed.

        To be asked again at each attempt to start the request: nothing is held between two of them.
        """
        if not self.caching or request.wants_prompt_logprobs:
            return []
        usable = (request.num_tokens - 1) // self.block_size
        found: list[int] = []
        find = self.pool.find
        for key in request.keys.up_to(usable, request.token_ids)[:usable]:
            block = find(key)
            if block is None:
                break
            found.append(block)
        return found

    def start_key(self, request: Request) -> bytes | None:
        """The key under which another group may hold the request's first block."""
        if not self.caching or request.num_tokens <= self.block_size or request.wants_prompt_logprobs:
            return None
        return request.keys.up_to(1, request.token_ids)[0]

    def has_room(self, request: Request, matched: list[int], keep_free: int) -> bool:
        """Whether all known tokens fit beside `keep_free` blocks, given what was matched just now."""
        revived = sum(map(self.pool.is_free, matched))
        fresh = self.num_blocks_for(request.num_tokens) - len(matched)
        return fresh + revived + keep_free <= self.pool.num_free

    def admit(self, request: Request, matched: list[int], saved: SavedKv | None) -> list[tuple[int, int]]:
        """Blocks for every known token: a prefill never stops half-way for want of memory.

        Returns the (source, destination) to copy of those in `saved` that were not matched.
        """
        pool = self.pool
        for block in matched:
            pool.share(block)
        fresh = self.num_blocks_for(request.num_tokens) - len(matched)
        request.blocks = matched + [pool.allocate() for _ in range(fresh)]
        request.num_published = len(matched)
        request.num_computed = len(matched) * self.block_size
        if saved is None or saved.num_tokens <= request.num_computed:
            return []
        request.num_computed = saved.num_tokens
        first = len(matched)
        return list(zip(saved.blocks[first:], request.blocks[first : len(saved.blocks)], strict=True))

    def restore(self, kept: Sequence[SlotKv]) -> None:
        """Make findable what the ranks of a new pool have computed for a scheduler before this one."""
        if not self.caching:
            return
        found: dict[bytes, int] = {}
        for slot in kept:
            blocks = np.frombuffer(slot.blocks, np.int32).tolist()
            keys = PrefixKeys(slot.root, self.block_size)
            keys.up_to(len(blocks), np.frombuffer(slot.token_ids, np.int32).tolist())
            for key, block in zip(keys.keys, blocks, strict=True):
                found.setdefault(key, block)
            self._on_prefix(keys.keys[0])
        # The last ones first: they are to be evicted before what they follow, in whichever slot.
        self.pool.restore({block: key for key, block in reversed(found.items())})

    def append_block(self, request: Request) -> int:
        block = self.pool.allocate()
        request.blocks.append(block)
        return block

    def share_prompt(self, parent: Request, sibling: Request) -> None:
        """The sibling holds the parent's prompt until it takes its own slot with `split_last`."""
        blocks = parent.blocks[: self.num_blocks_for(parent.num_prompt_tokens)]
        for block in blocks:
            self.pool.share(block)
        sibling.blocks = blocks

    def split_last(self, sibling: Request) -> tuple[int, int] | None:
        """Give the sibling a last block of its own: the (source, destination) to copy, or None if it starts empty.

        The sibling computes its last prompt token again, for logits of its own, so the block with that token is
        written even where it is full.
        """
        last = sibling.num_prompt_tokens - 1
        shared = sibling.blocks.pop()
        own = self.append_block(sibling)
        self.pool.release([shared])
        sibling.num_computed = last
        sibling.num_published = last // self.block_size
        return (shared, own) if last % self.block_size else None

    def release(self, request: Request) -> None:
        request.blocks.reverse()
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_published = request.num_landed = 0
        request.num_computed = 0

    def publish(self, request: Request, num_computed: int) -> None:
        """Make the blocks findable that were full once `num_computed` tokens had really been computed."""
        if not self.caching:
            return
        full = num_computed // self.block_size
        first = request.num_published
        if first < full:
            keys = request.keys.up_to(full, request.token_ids)
            if first == 0:
                self._on_prefix(keys[0])
            for i in range(first, full):
                self.pool.publish(request.blocks[i], keys[i])
            request.num_published = full

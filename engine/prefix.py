"""Names for KV blocks by their content: a hash chain over (tenant, salt) and the token ids from the start."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from struct import Struct

import numpy as np

KEY_BYTES = 32


def root_key(tenant: str, salt: str) -> bytes:
    """The start of a chain. Both parts are length-prefixed, so no two (tenant, salt) pairs collide by concatenation."""
    tenant_bytes, salt_bytes = tenant.encode(), salt.encode()
    sizes = len(tenant_bytes).to_bytes(8, "little") + len(salt_bytes).to_bytes(8, "little")
    return blake2b(sizes + tenant_bytes + salt_bytes, digest_size=KEY_BYTES).digest()


@cache
def _block_struct(block_size: int) -> Struct:
    return Struct(f"<{block_size}i")


class PrefixKeys:
    """The keys of one request's full blocks, computed once each, in order, when they are first asked for.

    key[i] = blake2b-256(key[i - 1], ids of block i): equal keys mean equal ids from position 0 on, the same tenant
    and the same salt, up to the collision resistance of the hash.
    """

    __slots__ = ("_block_size", "_last", "_pack", "keys", "root")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.keys: list[bytes] = []
        self.root = self._last = root
        self._block_size = block_size
        self._pack = _block_struct(block_size).pack

    def up_to(self, num_blocks: int, token_ids: list[int]) -> list[bytes]:
        """The known keys, at least `num_blocks` of them; the ids must hold that many full blocks."""
        first = len(self.keys)
        if first < num_blocks:
            size = self._block_size
            if first + 1 == num_blocks:
                # A block filled by decoding: a third of the cost of going through numpy.
                ids = self._pack(*token_ids[first * size : num_blocks * size])
                self._last = blake2b(self._last + ids, digest_size=KEY_BYTES).digest()
                self.keys.append(self._last)
                return self.keys
            ids = np.array(token_ids[first * size : num_blocks * size], np.int32).tobytes()
            width = 4 * size
            last = self._last
            for at in range(0, len(ids), width):
                last = blake2b(last + ids[at : at + width], digest_size=KEY_BYTES).digest()
                self.keys.append(last)
            self._last = last
        return self.keys

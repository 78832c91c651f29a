"""Puts this step's keys and values into the KV pool."""

from __future__ import annotations

from torch import Tensor

from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu


def kv_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """k and v [num_tokens, num_kv_heads, head_dim] go to kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim].

    Token t goes to block slot_mapping[t] // block_size, place slot_mapping[t] % block_size (int64); a negative
    slot is a padding token and is not written. No slot comes twice.
    """
    operation.implementation(k.device.type)(k, v, kv_cache, slot_mapping)


def kv_write_reference(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = kv_cache.shape[3]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, places = slots // block_size, slots % block_size
    kv_cache[0, blocks, :, places] = k[kept].to(kv_cache.dtype)
    kv_cache[1, blocks, :, places] = v[kept].to(kv_cache.dtype)


def _load_triton() -> Implementation:
    from orcaserve.kernels.gpu.kv import kv_write

    return kv_write


operation = Operation("kv_write", kv_write_reference, {"triton": _load_triton, "cpu": native_cpu("kv_write")})

"""Native CPU kernels: plain C, compiled by the system's compiler at the first start, called through ctypes."""

from orcaserve.kernels.cpu.library import available, num_threads, set_num_threads
from orcaserve.kernels.cpu.memory import advise_huge_pages
from orcaserve.kernels.cpu.ops import (
    copy_blocks,
    gelu_tanh_mul,
    kv_write,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from orcaserve.kernels.cpu.sampling import sample, token_logprobs, uniform

__all__ = [
    "advise_huge_pages",
    "available",
    "copy_blocks",
    "gelu_tanh_mul",
    "kv_write",
    "num_threads",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "sample",
    "set_num_threads",
    "silu_mul",
    "token_logprobs",
    "uniform",
]

"""The compiled library of this process: loaded once, its functions declared once."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from orcaserve.kernels.cpu import build

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum dtype of csrc/vec.h

_I, _L, _P, _F = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "orca_set_num_threads": (_I, [_I]),
    "orca_num_threads": (_I, []),
    "orca_rms_norm": (None, [_I, _P, _L, _P, _L, _P, _P, _P, _L, _L, _F]),
    "orca_gate_mul": (None, [_I, _I, _P, _L, _P, _L, _P, _L, _L]),
    "orca_rope_kv_write": (None, [_I, _P, _L, _P, _L, _P, _L, _P, _P, _P, _P, _P, _P, _L, _I, _I, _I, _L]),
    "orca_kv_write": (None, [_I, _P, _L, _P, _L, _P, _P, _P, _L, _I, _I, _L]),
    "orca_copy_blocks": (None, [_P, _L, _L, _P, _L]),
    "orca_paged_attention": (None, [_I, _P, _L, _P, _P, _P, _P, _P, _P, _L, _L, _I, _I, _I, _L, _F, _I, _F]),
    "orca_huge_pages": (None, [_P, _L]),
    "orca_read": (None, [_P, _L]),
    "orca_multiply_adds": (_L, [_L]),
    "orca_decoder_layers": (_I, [_P, _P, _P, _P]),
    "orca_linear": (None, [_I, _I, _P, _L, _P, _P, _P, _L, _L, _L, _L]),
    "orca_packed_bytes": (_L, [_I, _L, _L]),
    "orca_sample": (None, [_P, _L, _L, _L, _P, _P, _P, _P, _P, _P]),
    "orca_uniform": (None, [_P, _P, _P, _P, _L]),
    "orca_token_logprobs": (None, [_P, _L, _L, _L, _P, _L, _P, _P, _P, _P]),
    "orca_shm_region_bytes": (_L, [_I, _L]),
    "orca_shm_all_reduce": (_I, [_P, _P, _L, _I]),
    "orca_shm_broadcast": (_I, [_P, _P, _L]),
    "orca_shm_gather": (_I, [_P, _P, _P, _L, _P]),
    "orca_pack": (None, [_I, _P, _L, _P, _L, _L]),
}


class _Holder:
    """The library or the reason why there is none; decided at the first call."""

    library: ctypes.CDLL | None = None
    failure: str | None = None


def library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The library of this process. The first call compiles or loads it; `cache_dir` counts in that call alone.

    Raises build.BuildError, at every call once the first has failed.
    """
    if _Holder.library is not None:
        return _Holder.library
    if _Holder.failure is None:
        try:
            _Holder.library = _declared(build.load(cache_dir or build.default_cache_dir()))
            _Holder.library.orca_set_num_threads(torch.get_num_threads())
            return _Holder.library
        except (build.BuildError, OSError) as error:
            _Holder.failure = str(error)
            logger.warning("no native CPU kernels: %s", error)
    raise build.BuildError(_Holder.failure)


def available(cache_dir: Path | None = None) -> bool:
    """Whether the native CPU kernels run here; compiles them at the first call."""
    try:
        library(cache_dir)
    except build.BuildError:
        return False
    return True


def set_num_threads(num_threads: int) -> None:
    """How many threads an operation may use, this one counted. Tensor-parallel ranks on one machine share its cores."""
    if library().orca_set_num_threads(num_threads) != 0:
        raise ValueError(f"num_threads must be between 1 and 128, not {num_threads}")


def num_threads() -> int:
    return library().orca_num_threads()


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded

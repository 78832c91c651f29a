"""RMSNorm (Zhang and Sennrich, 2019), with the residual addition that comes before it in a decoder layer."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """x / rms(x) * weight over the last dimension: x [num_tokens, hidden] -> its shape and dtype.

    weight [hidden] is float32 whatever x is: weights like 1 + w, of which a checkpoint stores w, lose most in 16 bits.
    With a residual [num_tokens, hidden] the sum x + residual, rounded to its dtype, is what is normalised, and the
    result is (normed, sum). Computed in float32, rounded once.
    """
    run = rms_norm_reference if torch.compiler.is_compiling() else operation.implementation(x.device.type)
    return run(x, weight, eps, residual)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale * weight).to(x.dtype)
    return normed if residual is None else (normed, total)


def _load_triton() -> Implementation:
    from orcaserve.kernels.gpu.norms import rms_norm

    return rms_norm


operation = Operation("rms_norm", rms_norm_reference, {"triton": _load_triton, "cpu": native_cpu("rms_norm")})

"""RMSNorm in Triton: one program a row, which stays in registers between the sum of squares and the scaling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orcaserve.kernels.gpu.launch import next_power_of_two, warps_for


@triton.jit
def rms_norm_kernel(
    x, x_stride, residual, residual_stride, weight, out, total_out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < HIDDEN
    value = tl.load(x + row * x_stride + column, mask=real, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * residual_stride + column, mask=real, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total_out + row * HIDDEN + column, value, mask=real)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    gain = tl.load(weight + column, mask=real, other=0.0)
    tl.store(out + row * HIDDEN + column, (wide * scale * gain).to(out.dtype.element_ty), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    added = x if residual is None else residual
    assert x.stride(1) == added.stride(1) == 1, "a row lies densely"
    if num_tokens > 0:
        block = next_power_of_two(hidden)
        rms_norm_kernel[(num_tokens,)](
            x, x.stride(0), added, added.stride(0), weight, out, total, eps, HIDDEN=hidden, BLOCK=block,
            HAS_RESIDUAL=residual is not None, num_warps=warps_for(block), enable_fp_fusion=True
        )  # fmt: skip
    return out if residual is None else (out, total)

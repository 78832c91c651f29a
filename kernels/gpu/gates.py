"""The gates of gated MLPs in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gate_kernel(gate, gate_stride, up, up_stride, out, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < size
    x = tl.load(gate + row * gate_stride + column, mask=real, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=real, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = x * tl.sigmoid(x)
    tl.store(out + row * size + column, (x * y).to(out.dtype.element_ty), mask=real)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _launch(gate, up, gelu=False)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _launch(gate, up, gelu=True)


def _launch(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    num_tokens, size = gate.shape
    out = torch.empty((num_tokens, size), dtype=gate.dtype, device=gate.device)
    assert gate.stride(1) == up.stride(1) == 1, "a row lies densely"
    if num_tokens > 0:
        grid = (num_tokens, -(-size // BLOCK))
        gate_kernel[grid](
            gate,
            gate.stride(0),
            up,
            up.stride(0),
            out,
            size,
            BLOCK=BLOCK,
            GELU=gelu,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out

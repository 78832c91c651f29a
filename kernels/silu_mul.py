"""The gate of a gated MLP: activation(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both [num_tokens, intermediate] -> the same shape and dtype, contiguous; computed in float32.

    The inputs may be the two halves of one [num_tokens, 2 * intermediate] tensor.
    """
    if torch.compiler.is_compiling():
        return silu_mul_reference(gate, up)
    return silu_operation.implementation(gate.device.type)(gate, up)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation of GELU; shapes as in `silu_mul`."""
    if torch.compiler.is_compiling():
        return gelu_tanh_mul_reference(gate, up)
    return gelu_operation.implementation(gate.device.type)(gate, up)


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def gelu_tanh_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


def _load_triton_silu() -> Implementation:
    from orcaserve.kernels.gpu.gates import silu_mul

    return silu_mul


def _load_triton_gelu() -> Implementation:
    from orcaserve.kernels.gpu.gates import gelu_tanh_mul

    return gelu_tanh_mul


silu_operation = Operation("silu_mul", silu_mul_reference, {"triton": _load_triton_silu, "cpu": native_cpu("silu_mul")})
gelu_operation = Operation(
    "gelu_tanh_mul", gelu_tanh_mul_reference, {"triton": _load_triton_gelu, "cpu": native_cpu("gelu_tanh_mul")}
)

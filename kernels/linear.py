"""Matrix products with weights that were laid out once for the machine they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels import cpu
from orcaserve.kernels.cpu.library import DTYPES, library
from orcaserve.kernels.cpu.memory import huge_pages

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] as `linear` reads it."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor  # native: bytes in the layout of cpu/csrc/linear.c; else the weight itself
    is_native: bool

    @property
    def backend(self) -> str:
        return "cpu" if self.is_native else "torch"


def pack(weight: Tensor) -> PackedWeight:
    """Lays the weight [out_features, in_features] out for `linear`. The weight itself may be dropped afterwards.

    On a CPU with a C compiler float32 and bfloat16 weights are copied into panels; everything else keeps the weight
    as it is and runs torch's own product.
    """
    out_features, in_features = weight.shape
    is_native = weight.device.type == "cpu" and weight.dtype in NATIVE_DTYPES and cpu.available()
    if not is_native:
        return PackedWeight(out_features, in_features, weight.dtype, weight, False)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    dtype = DTYPES[weight.dtype]
    data = huge_pages(library().orca_packed_bytes(dtype, in_features, out_features))
    library().orca_pack(dtype, weight.data_ptr(), weight.stride(0), data.data_ptr(), in_features, out_features)
    return PackedWeight(out_features, in_features, weight.dtype, data, True)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [num_tokens, in_features] times the weight, plus bias [out_features] -> [num_tokens, out_features].

    Sums are float32, rounded once to `out_dtype` (default: the dtype of x; float32 keeps logits exact). On the CPU a
    row's result does not depend on the other rows, to the bit.
    """
    if not weight.is_native:
        product = functional.linear(x, weight.data, bias)
        return product if out_dtype is None else product.to(out_dtype)
    rows, in_features = x.shape
    if in_features != weight.in_features or x.dtype != weight.dtype:
        raise ValueError(
            f"linear: x has {in_features} features of {x.dtype}, the weight {weight.in_features} of {weight.dtype}"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    if in_features % 2 and x.dtype == torch.bfloat16:  # features are taken in pairs
        x = functional.pad(x, (0, 1))
    result_dtype = out_dtype or x.dtype
    out = torch.empty((rows, weight.out_features), dtype=result_dtype)
    library().orca_linear(
        DTYPES[x.dtype],
        DTYPES[result_dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        weight.out_features,
        rows,
        in_features,
        weight.out_features,
    )
    return out

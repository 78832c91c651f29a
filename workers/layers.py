"""The sharded building blocks of a model: linears, norms, the embedding and the head.

A layer is built with empty weights, says which checkpoint tensors it wants (`parts`), is filled by `weights.load`, and
is then finished: its weights take the form that the kernels like, and its submodules become plain attributes, because
torch's module look-ups would cost a decode step on a CPU a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from orcaserve.kernels.linear import PackedWeight, linear, pack
from orcaserve.kernels.rms_norm import rms_norm
from orcaserve.workers.sharding import Span
from orcaserve.workers.tp import TpGroup


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, and which piece of it goes where in a parameter."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor there
    source: tuple[slice, ...]  # this rank's piece
    param: str  # the layer's attribute
    rows: slice  # of the parameter, which the piece fills


class Layer(nn.Module):
    """A module with weights of its own."""

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def finish(self) -> None:
        """All parts are loaded."""


@dataclass(frozen=True, slots=True)
class Output:
    """One of the linears that a fused one replaces."""

    name: str  # of the module in the checkpoint
    total: int  # rows there
    rows: slice  # this rank's

    @property
    def width(self) -> int:
        return self.rows.stop - self.rows.start


class ColumnLinear(Layer):
    """Linears of one input, fused, each cut by output rows: what comes out is this rank's share of each."""

    packed: PackedWeight

    def __init__(self, in_features: int, outputs: Sequence[Output], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.outputs = outputs
        self.out_features = sum(output.width for output in outputs)
        self.weight: Tensor = empty(self.out_features, in_features, dtype=dtype)
        self.bias: Tensor | None = empty(self.out_features, dtype=dtype) if bias else None

    def parts(self) -> Iterator[Part]:
        start = 0
        for output in self.outputs:
            rows = slice(start, start + output.width)
            shape = (output.total, self.in_features)
            yield Part(f"{output.name}.weight", shape, (output.rows, slice(None)), "weight", rows)
            if self.bias is not None:
                yield Part(f"{output.name}.bias", (output.total,), (output.rows,), "bias", rows)
            start = rows.stop

    def finish(self) -> None:
        self.packed = pack(taken(self, "weight"))
        if self.bias is not None:
            self.bias = taken(self, "bias")

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)

    __call__ = forward


class RowLinear(Layer):
    """A linear cut by input columns; the sum over ranks is the whole result."""

    packed: PackedWeight

    def __init__(
        self,
        name: str,
        in_features: int,
        columns: slice,
        out_features: int,
        bias: bool,
        tp: TpGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.name = name
        self.full_shape = (out_features, in_features)
        self.columns = columns
        self.tp = tp
        self.weight: Tensor = empty(out_features, columns.stop - columns.start, dtype=dtype)
        self.bias: Tensor | None = empty(out_features, dtype=dtype) if bias else None

    def parts(self) -> Iterator[Part]:
        rows = slice(0, self.full_shape[0])
        yield Part(f"{self.name}.weight", self.full_shape, (rows, self.columns), "weight", rows)
        if self.bias is not None:
            yield Part(f"{self.name}.bias", self.full_shape[:1], (rows,), "bias", rows)

    def finish(self) -> None:
        self.packed = pack(taken(self, "weight"))
        if self.bias is not None:
            bias = taken(self, "bias")
            self.bias = bias if self.tp.rank == 0 else None  # added once

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(linear(x, self.packed, self.bias))

    __call__ = forward


class RMSNorm(Layer):
    """`offset` 1 is for families that store the distance of the weight from one."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.offset = offset
        self.weight: Tensor = empty(size, dtype=dtype)

    def parts(self) -> Iterator[Part]:
        yield replicated(f"{self.name}.weight", self.weight, "weight")

    def finish(self) -> None:
        self.weight = taken(self, "weight").float() + self.offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    __call__ = forward

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return rms_norm(x, self.weight, self.eps, residual)


class Embedding(Layer):
    """Token embedding, cut by vocabulary."""

    def __init__(self, name: str, size: int, width: int, span: Span, tp: TpGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.shape = (size, width)
        self.span = span
        self.tp = tp
        self.weight: Tensor = empty(len(span), width, dtype=dtype)

    def parts(self) -> Iterator[Part]:
        rows = slice(self.span.start, self.span.stop)
        yield Part(f"{self.name}.weight", self.shape, (rows, slice(None)), "weight", slice(0, len(self.span)))

    def finish(self) -> None:
        self.weight = taken(self, "weight")

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return functional.embedding(ids, self.weight)
        local = ids - self.span.start
        foreign = (local < 0) | (local >= len(self.span))
        rows = functional.embedding(local.masked_fill_(foreign, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill_(foreign.unsqueeze(1), 0))

    __call__ = forward


class LmHead(Layer):
    """Hidden states to logits, cut by vocabulary, gathered on rank 0. A tied head takes the embedding's weights."""

    packed: PackedWeight

    def __init__(self, name: str, embedding: Embedding, tied: bool) -> None:
        super().__init__()
        self.name = name
        self.shape = embedding.shape
        self.span = embedding.span
        self.tp = embedding.tp
        self.source = [embedding] if tied else []  # in a list, lest torch take it for a submodule
        if not tied:
            self.weight: Tensor = empty(*embedding.weight.shape, dtype=embedding.weight.dtype)

    def parts(self) -> Iterator[Part]:
        if not self.source:
            rows = slice(self.span.start, self.span.stop)
            yield Part(f"{self.name}.weight", self.shape, (rows, slice(None)), "weight", slice(0, len(self.span)))

    def finish(self) -> None:
        self.packed = pack(self.source[0].weight if self.source else taken(self, "weight"))

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Float32, so that near ties are not rounded away."""
        return self.tp.gather_columns(linear(hidden, self.packed, None, torch.float32), self.shape[0])

    __call__ = forward


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def replicated(name: str, weight: Tensor, param: str) -> Part:
    """The whole of a checkpoint tensor, on every rank."""
    everything = tuple(slice(0, n) for n in weight.shape)
    return Part(name, tuple(weight.shape), everything, param, everything[0])


def taken(layer: Layer, param: str) -> Tensor:
    """Takes a parameter out of torch's registry, as an ordinary tensor."""
    weight = getattr(layer, param)
    delattr(layer, param)
    return weight.detach()


def settle(model: nn.Module) -> None:
    """Make submodules plain attributes, which Python finds at once."""
    for module in model.modules():
        module.__dict__.update(module._modules)

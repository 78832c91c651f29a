"""All layers of a decoder in one call, for CPUs, where calls from Python cost as much as a small model's arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.cpu.library import DTYPES, library
from orcaserve.kernels.linear import PackedWeight, linear
from orcaserve.kernels.paged_attention import paged_attention
from orcaserve.kernels.rms_norm import rms_norm
from orcaserve.kernels.rope import rope_kv_write
from orcaserve.kernels.silu_mul import gelu_tanh_mul, silu_mul

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, or of one rank's share of it: attention and a gated MLP, with a norm before each.

    Where there is a norm after attention or MLP as well, it is applied before the addition to the residual. Norm
    weights are float32 [hidden], those of the heads [head_dim].
    """

    input_norm: Tensor
    qkv: PackedWeight  # hidden -> (num_heads + 2 num_kv_heads) head_dim
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight  # hidden -> 2 intermediate
    down: PackedWeight
    cos_sin: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    after_attention_norm: Tensor | None = None
    after_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_heads: int  # of this rank
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: Activation


class NativeDecoder:
    """The layers, ready to run over the KV pools of one worker, a pool per layer."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        shape: DecoderShape,
        kv_caches: Sequence[Tensor],
        group: ctypes.Structure | None = None,
    ) -> None:
        """`group`: the struct Group of csrc/shared_memory.c whose ranks share the layers; None: this rank has all.

        Raises ValueError for what the native library cannot run; `can_run` asks first.
        """
        first = layers[0]
        if not can_run(layers):
            raise ValueError(f"the native decoder runs packed float32 or bfloat16 weights, not {first.qkv.dtype}")
        self.dtype = first.qkv.dtype
        self.hidden = first.qkv.in_features
        self._alive = (layers, kv_caches, group)  # the structures below hold their addresses
        rows = [_layer(layer, kv_cache) for layer, kv_cache in zip(layers, kv_caches, strict=True)]
        self._layers = (_Layer * len(rows))(*rows)
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            None if group is None else ctypes.addressof(group),
            len(rows),
            self.hidden,
            first.down.in_features,
            kv_caches[0].shape[3],
            DTYPES[self.dtype],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            int(shape.activation == "gelu_tanh"),
            shape.eps,
        )
        self._run = library().orca_decoder_layers
        self._address = ctypes.addressof(self._decoder)

    def __call__(self, x: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Embeddings [num_tokens, hidden] -> (what is still to be added, the residual), as decoder_layers_reference.

        Overwrites x. Raises TimeoutError when another rank did not come.
        """
        if x.dtype != self.dtype or x.shape[1] != self.hidden or not x.is_contiguous():
            raise ValueError(
                f"x is {tuple(x.shape)} of {x.dtype}, needed are contiguous rows of {self.hidden} of {self.dtype}"
            )
        residual = torch.empty(x.shape, dtype=x.dtype)
        tables = batch.block_tables
        step = _Batch(
            batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.positions.data_ptr(),
            tables.stride(0),
            batch.num_requests,
            x.shape[0],
        )
        error = self._run(self._address, ctypes.byref(step), x.data_ptr(), residual.data_ptr())
        if error:
            raise TimeoutError(f"an all-reduce between the ranks failed with error {-error}")
        return x, residual


def can_run(layers: Sequence[DecoderLayer]) -> bool:
    """Whether NativeDecoder takes these layers: all weights packed by the native library."""
    return all(weight.is_native for layer in layers for weight in (layer.qkv, layer.output, layer.gate_up, layer.down))


def decoder_layers_reference(
    layers: Sequence[DecoderLayer],
    shape: DecoderShape,
    kv_caches: Sequence[Tensor],
    x: Tensor,
    batch: AttentionBatch,
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor]:
    """The same with one call an operation."""
    heads, kv_heads, head_dim, eps = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.eps
    activation = silu_mul if shape.activation == "silu" else gelu_tanh_mul
    residual: Tensor | None = None
    for layer, kv_cache in zip(layers, kv_caches, strict=True):
        if residual is None:
            normed, residual = rms_norm(x, layer.input_norm, eps), x
        else:
            normed, residual = rms_norm(x, layer.input_norm, eps, residual)
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q.reshape(-1, head_dim), layer.q_norm, eps).view(q.shape)
            k = rms_norm(k.reshape(-1, head_dim), layer.k_norm, eps).view(k.shape)
        q = rope_kv_write(q, k, v, layer.cos_sin, kv_cache, batch)
        attended = paged_attention(q, kv_cache, batch, layer.scale, layer.window, layer.softcap)
        x = all_reduce(linear(attended.view(len(x), -1), layer.output, layer.output_bias))
        if layer.after_attention_norm is not None:
            x = rms_norm(x, layer.after_attention_norm, eps)
        normed, residual = rms_norm(x, layer.mlp_norm, eps, residual)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        x = all_reduce(linear(activation(gate, up), layer.down, layer.down_bias))
        if layer.after_mlp_norm is not None:
            x = rms_norm(x, layer.after_mlp_norm, eps)
    assert residual is not None, "a decoder has layers"
    return x, residual


_POINTER = ctypes.c_void_p


class _Layer(ctypes.Structure):
    """struct decoder_layer of cpu/csrc/decoder.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "q_norm", "k_norm", "after_attention_norm", "mlp_norm")),
        ("after_mlp_norm", _POINTER),
        *((name, _POINTER) for name in ("qkv", "qkv_bias", "output", "output_bias")),
        *((name, _POINTER) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        *((name, _POINTER) for name in ("cos_sin", "k_cache", "v_cache")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


class _Decoder(ctypes.Structure):
    """struct decoder."""

    _fields_ = (
        ("layers", _POINTER),
        ("group", _POINTER),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate", "block_size")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "head_dim", "gelu")),
        ("eps", ctypes.c_float),
    )


class _Batch(ctypes.Structure):
    """struct decoder_batch."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_start", "context_lens", "block_tables", "slot_mapping", "positions")),
        *((name, ctypes.c_int64) for name in ("table_stride", "num_requests", "num_tokens")),
    )


def _layer(layer: DecoderLayer, kv_cache: Tensor) -> _Layer:
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache strides {kv_cache.stride()} of {tuple(kv_cache.shape)}: it must be contiguous")

    for norm in ("input_norm", "q_norm", "k_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm"):
        if (weight := getattr(layer, norm)) is not None and weight.dtype != torch.float32:
            raise ValueError(f"{norm} is {weight.dtype}, not {torch.float32}")

    def at(x: Tensor | None) -> int | None:
        assert x is None or x.is_contiguous()
        return None if x is None else x.data_ptr()

    return _Layer(
        at(layer.input_norm),
        at(layer.q_norm),
        at(layer.k_norm),
        at(layer.after_attention_norm),
        at(layer.mlp_norm),
        at(layer.after_mlp_norm),
        at(layer.qkv.data),
        at(layer.qkv_bias),
        at(layer.output.data),
        at(layer.output_bias),
        at(layer.gate_up.data),
        at(layer.gate_up_bias),
        at(layer.down.data),
        at(layer.down_bias),
        at(layer.cos_sin),
        at(kv_cache[0]),
        at(kv_cache[1]),
        layer.scale,
        layer.softcap,
        layer.window,
    )

"""Rotary position embedding (Su et al., RoFormer, 2021), fused with the write of K and V into the KV pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orcaserve.kernels import opaque
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.dispatch import Implementation, Operation, native_cpu
from orcaserve.kernels.kv_write import kv_write_reference

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class UnsupportedRope(ValueError):
    """A model's rope parameters that this build cannot turn into a table."""


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
    """Rotates q [num_tokens, num_heads, head_dim] and k, and puts the rotated k and v into the pool. Returns q rotated.

    cos_sin is float32 [max_position, head_dim]: the cosines of the head_dim / 2 angles, then their sines
    (`cos_sin_table`). Element i of a head is rotated with element i + head_dim / 2. Tokens whose slot is negative are
    padding and not written. Computed in float32, rounded once; q, k and v may be views into one fused tensor.
    """
    if torch.compiler.is_compiling():
        return opaque.rope_kv_write(q, k, v, cos_sin, kv_cache, *opaque.columns(batch))
    return operation.implementation(q.device.type)(q, k, v, cos_sin, kv_cache, batch)


def rope_kv_write_reference(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_cache: Tensor, batch: AttentionBatch
) -> Tensor:
    cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
    kv_write_reference(rotate(k, cos, sin), v, kv_cache, batch.slot_mapping)
    return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def cos_sin_table(
    head_dim: int, num_positions: int, parameters: Mapping[str, Any], max_position_embeddings: int
) -> Tensor:
    """The float32 table [num_positions, head_dim] of a model, on the CPU.

    parameters: `rope_parameters` of a Hugging Face config (rope_theta, rope_type, factor, ...).
    max_position_embeddings: the config's field, which "dynamic" measures its stretch against and the others fall back
    to when they name no original length. "dynamic" depends on the length of the text: it is taken for `num_positions`,
    the longest that will be served, so that a token's rotation never changes while its key is in the pool.
    Raises UnsupportedRope for a rope type that is not in ROPE_TYPES or lacks a field.
    """
    inverse, magnitude = inverse_frequencies(head_dim, num_positions, parameters, max_position_embeddings)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


def inverse_frequencies(
    head_dim: int, num_positions: int, parameters: Mapping[str, Any], max_position_embeddings: int
) -> tuple[Tensor, float]:
    """The head_dim / 2 angles per position, and the factor on cosines and sines (other than 1 for yarn alone)."""
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedRope(f"rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedRope(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported, only 1.0")
    try:
        theta = float(parameters["rope_theta"])
        if rope_type == "default":
            return _geometric(head_dim, theta), 1.0
        if rope_type == "linear":
            return _geometric(head_dim, theta) / parameters["factor"], 1.0
        if rope_type == "dynamic":
            return _dynamic(head_dim, theta, parameters["factor"], num_positions / max_position_embeddings), 1.0
        original = parameters.get("original_max_position_embeddings") or max_position_embeddings
        if rope_type == "llama3":
            return _llama3(_geometric(head_dim, theta), parameters, original), 1.0
        return _yarn(head_dim, theta, parameters, original, max_position_embeddings)
    except KeyError as missing:
        raise UnsupportedRope(f"rope_type {rope_type!r} needs the field {missing}") from missing


def _geometric(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _dynamic(head_dim: int, theta: float, factor: float, stretch: float) -> Tensor:
    """NTK-aware scaling: the base grows with the length, so that the slowest dimension is interpolated."""
    growth = factor * max(stretch, 1.0) - (factor - 1.0)
    return _geometric(head_dim, theta * growth ** (head_dim / (head_dim - 2)))


def _llama3(inverse: Tensor, parameters: Mapping[str, Any], original: int) -> Tensor:
    """Slow dimensions are divided by the factor, fast ones kept, those between blended (Llama 3.1's report)."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original * inverse / (2 * math.pi)  # full turns over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (kept + (1.0 - kept) / parameters["factor"])


def _yarn(
    head_dim: int, theta: float, parameters: Mapping[str, Any], original: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023), section 3: a ramp over dimensions, and a temperature folded into the table."""
    factor = parameters.get("factor") or max_position_embeddings / original

    def dimension_with(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_with(parameters.get("beta_fast") or 32)
    last = dimension_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    inverse = _geometric(head_dim, theta)
    return inverse * (1.0 - interpolated) + inverse / factor * interpolated, _yarn_magnitude(factor, parameters)


def _yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


def _load_triton() -> Implementation:
    from orcaserve.kernels.gpu.kv import rope_kv_write

    return rope_kv_write


operation = Operation(
    "rope_kv_write", rope_kv_write_reference, {"triton": _load_triton, "cpu": native_cpu("rope_kv_write")}
)

"""All layers in one native call equal the operations called one by one, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orcaserve.kernels import cpu
from orcaserve.kernels.decoder_layers import (
    DecoderLayer,
    DecoderShape,
    NativeDecoder,
    can_run,
    decoder_layers_reference,
)
from orcaserve.kernels.linear import pack
from orcaserve.kernels.rope import cos_sin_table
from tests.kernels.cpu_cases import batch_of, pool_of, random, threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")

HIDDEN, INTERMEDIATE, BLOCK_SIZE = 72, 100, 8


def layers_of(
    generator: torch.Generator, count: int, shape: DecoderShape, dtype: torch.dtype, *, has_all: bool
) -> list[DecoderLayer]:
    """`has_all`: with biases and every norm there is."""
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    table = cos_sin_table(head_dim, 64, {"rope_theta": 10000.0}, 64)

    def weight(*size: int) -> torch.Tensor:
        return (random(generator, *size, dtype=torch.float32) * size[-1] ** -0.5).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return random(generator, size, dtype=torch.float32)

    def bias(size: int) -> torch.Tensor:
        return norm(size).to(dtype)

    def layer() -> DecoderLayer:
        optional = {}
        if has_all:
            optional = {
                "qkv_bias": bias((heads + 2 * kv_heads) * head_dim),
                "output_bias": bias(HIDDEN),
                "gate_up_bias": bias(2 * INTERMEDIATE),
                "down_bias": bias(HIDDEN),
                "q_norm": norm(head_dim),
                "k_norm": norm(head_dim),
                "after_attention_norm": norm(HIDDEN),
                "after_mlp_norm": norm(HIDDEN),
            }
        return DecoderLayer(
            input_norm=norm(HIDDEN),
            qkv=pack(weight((heads + 2 * kv_heads) * head_dim, HIDDEN)),
            output=pack(weight(HIDDEN, heads * head_dim)),
            mlp_norm=norm(HIDDEN),
            gate_up=pack(weight(2 * INTERMEDIATE, HIDDEN)),
            down=pack(weight(HIDDEN, INTERMEDIATE)),
            cos_sin=table,
            scale=head_dim**-0.5,
            window=9 if has_all else 0,
            softcap=20.0 if has_all else 0.0,
            **optional,
        )

    return [layer() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_all", [False, True], ids=["llama", "everything"])
@pytest.mark.parametrize("team", [1, 2])
def test_equals_the_operations_one_by_one(dtype: torch.dtype, has_all: bool, team: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = DecoderShape(6, 2, 16, 1e-5, "gelu_tanh" if has_all else "silu")
    layers = layers_of(generator, 3, shape, dtype, has_all=has_all)
    batch, num_blocks = batch_of(generator, [1, 12, 1, 3], [30, 12, 1, 20], BLOCK_SIZE)
    pools = [pool_of(generator, batch, num_blocks, 2, BLOCK_SIZE, 16, dtype) for _ in layers]
    expected_pools = [pool.clone() for pool in pools]
    x = random(generator, 17, HIDDEN, dtype=dtype)
    with threads(team):
        expected, expected_residual = decoder_layers_reference(layers, shape, expected_pools, x.clone(), batch)
        got, residual = NativeDecoder(layers, shape, pools)(x.clone(), batch)
    assert expected.isfinite().all()
    assert torch.equal(got, expected)
    assert torch.equal(residual, expected_residual)
    for pool, expected_pool in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool.nan_to_num(7.0), expected_pool.nan_to_num(7.0))


def test_refuses_what_it_cannot_run() -> None:
    generator = torch.Generator().manual_seed(2)
    shape = DecoderShape(2, 1, 16, 1e-5, "silu")
    batch, num_blocks = batch_of(generator, [1], [5], BLOCK_SIZE)
    half = layers_of(generator, 1, shape, torch.float16, has_all=False)
    pools = [torch.zeros(2, num_blocks, 1, BLOCK_SIZE, 16)]
    assert not can_run(half)
    with pytest.raises(ValueError, match="not torch"):
        NativeDecoder(half, shape, pools)
    layers = layers_of(generator, 1, shape, torch.float32, has_all=False)
    with pytest.raises(ValueError, match=r"mlp_norm is torch\.bfloat16"):
        NativeDecoder([replace(layers[0], mlp_norm=layers[0].mlp_norm.bfloat16())], shape, pools)
    decoder = NativeDecoder(layers, shape, pools)
    with pytest.raises(ValueError, match=r"x is \(1, 71\)"):
        decoder(torch.zeros(1, 71), batch)

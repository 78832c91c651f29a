"""The rotary tables against transformers; the fused Triton kernel, interpreted, against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from orcaserve.kernels.rope import (
    ROPE_TYPES,
    UnsupportedRope,
    cos_sin_table,
    inverse_frequencies,
    rope_kv_write_reference,
    rotate,
)
from tests.kernels.cpu_cases import TOLERANCES, batch_of, random

PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, with its own ramp": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, of DeepSeek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn, given its magnitude": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.9,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_positions", [1000, 20_000])
def test_frequencies_are_those_of_transformers(name: str, head_dim: int, num_positions: int) -> None:
    parameters = {"rope_theta": 500_000.0, **PARAMETERS[name]}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=dict(parameters),
    )
    compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, expected_magnitude = compute(config, torch.device("cpu"), seq_len=num_positions)
    inverse, magnitude = inverse_frequencies(head_dim, num_positions, parameters, 8192)
    torch.testing.assert_close(inverse, expected, rtol=1e-5, atol=0.0)
    assert magnitude == pytest.approx(expected_magnitude)


def test_table_of_the_default_type() -> None:
    table = cos_sin_table(8, 100, {"rope_theta": 10_000.0}, 100)
    assert table.shape == (100, 8)
    assert table.dtype == torch.float32
    for position in (0, 1, 99):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert table[position, 4 + pair].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_magnitude_is_in_the_table() -> None:
    parameters = {"rope_theta": 10_000.0, **PARAMETERS["yarn, given its magnitude"]}
    assert cos_sin_table(64, 4, parameters, 8192)[0, 0].item() == pytest.approx(0.9)


def test_the_old_name_of_the_type_is_understood() -> None:
    old = {"rope_theta": 10_000.0, "type": "linear", "factor": 2.0}
    new = {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}
    assert torch.equal(cos_sin_table(64, 9, old, 16), cos_sin_table(64, 9, new, 16))


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"rope_theta": 1e4, "rope_type": "longrope"}, "longrope"),
        ({"rope_theta": 1e4, "rope_type": "linear"}, "factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "0.5"),
    ],
)
def test_what_is_not_supported_is_named(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedRope, match=told):
        cos_sin_table(64, 16, parameters, 16)


def test_every_type_is_tested() -> None:
    assert {"default", *(parameters["rope_type"] for parameters in PARAMETERS.values())} == set(ROPE_TYPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1, 64), (9, 3, 64), (6, 2, 80), (4, 4, 128), (40, 40, 64)])
def test_fused_kernel(interpreted: Callable[[str], Any], dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_heads)
    batch, num_blocks = batch_of(generator, [1, 5], [34, 20], 16)
    batch.slot_mapping[2] = -1  # a padding token
    fused = random(generator, 6, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    table = cos_sin_table(head_dim, 64, {"rope_theta": 10_000.0}, 64)
    pool = torch.full((2, num_blocks, num_kv_heads, 16, head_dim), torch.nan, dtype=dtype)
    expected_pool = pool.clone()
    out = interpreted("kv").rope_kv_write(q, k, v, table, pool, batch)
    expected = rope_kv_write_reference(q, k, v, table, expected_pool, batch)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert int(expected_pool[:, :, 0, :, 0].isfinite().sum()) == 2 * 5


def test_no_token(interpreted: Callable[[str], Any]) -> None:
    batch, num_blocks = batch_of(torch.Generator().manual_seed(0), [1], [1], 16)
    nothing = replace(batch, positions=batch.positions[:0], slot_mapping=batch.slot_mapping[:0])
    pool = torch.zeros(2, num_blocks, 1, 16, 64)
    table = cos_sin_table(64, 4, {"rope_theta": 10_000.0}, 4)
    empty = torch.ones(0, 1, 64)
    assert interpreted("kv").rope_kv_write(empty, empty, empty, table, pool, nothing).shape == (0, 1, 64)
    assert not pool.any()


def test_scores_depend_on_the_distance_alone() -> None:
    """The law that rotary embedding is for: q at m and k at n meet as they do at m + s and n + s."""
    generator = torch.Generator().manual_seed(0)
    q, k = random(generator, 2, 1, 1, 64, dtype=torch.float32)
    table = cos_sin_table(64, 300, {"rope_theta": 10_000.0}, 300)

    def score(query_at: int, key_at: int) -> float:
        rotated = [
            rotate(x, *table[at : at + 1].unsqueeze(1).chunk(2, dim=-1)) for x, at in ((q, query_at), (k, key_at))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(207, 203), abs=1e-3)
    assert abs(score(7, 3) - score(7, 5)) > 1e-2

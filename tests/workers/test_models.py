"""Every family against transformers on a tiny random checkpoint, cut over 1, 2 and 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_groups import generate, greedy, make_group, token_ids
from tiny_models import FAMILIES, assert_greedy, reference_logits

from orcaserve.engine.messages import Chunk, NewSlot, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.layers import RMSNorm

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(2, 199, length).tolist() for length in (1, 7, 40, 90)]


def one_prompt(prompt: list[int]) -> StepPlan:
    new = NewSlot(
        3, np.array(prompt, np.int32).tobytes(), len(prompt), SamplingParams(max_tokens=1, seed=0, temperature=0)
    )
    blocks = np.arange(5, 5 + -(-len(prompt) // 16), dtype=np.int32)
    slots = np.full_like(blocks, 3)
    return StepPlan(0, [], [new], slots.tobytes(), blocks.tobytes(), [], [Chunk(3, 0, len(prompt), True)], b"")


def assert_equals_transformers(folder, model, size: int, **changes) -> None:
    group = make_group(folder, size, **changes)
    for prompt in PROMPTS:
        group.call("reset")
        _, [logits] = group.call("step_with_logits", one_prompt(prompt))
        torch.testing.assert_close(
            torch.from_numpy(logits[0]), reference_logits(model, prompt)[-1], rtol=1e-4, atol=1e-4
        )
    found = generate(group, [greedy(str(i), prompt, 32) for i, prompt in enumerate(PROMPTS)], budget=24, arrive_every=3)
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(model, prompt, token_ids(found[str(i)]), 32)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(tiny, family, size):
    """6 heads over 2 KV heads: one group each at 2 ranks; at 4, two ranks share a KV head as 2 + 1 heads."""
    assert_equals_transformers(*tiny(family), size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_an_operation_computes_the_same(tiny, family, size):
    """What GPUs run, and CPUs without a compiler: with a named backend the layers do not run as one native call."""
    folder, model = tiny(family)
    group = make_group(folder, size, attention_backend="reference")
    _, [logits] = group.call("step_with_logits", one_prompt(PROMPTS[3]))
    torch.testing.assert_close(
        torch.from_numpy(logits[0]), reference_logits(model, PROMPTS[3])[-1], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [(9, 3, 2), (9, 3, 4), (8, 8, 3), (4, 1, 4)],
)
def test_case_32_ranks_need_not_divide_the_heads(tiny, num_heads, num_kv_heads, size):
    fields = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": 72}
    assert_equals_transformers(*tiny("llama", **fields), size)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling(tiny, rope):
    assert_equals_transformers(*tiny("llama", rope_parameters={"rope_theta": 10_000.0, **rope}), 1)


def test_case_33_tied_heads(tiny):
    assert_equals_transformers(*tiny("llama", tie_word_embeddings=True), 2)


def test_the_distance_from_one_of_a_norm_is_not_rounded_away():
    """Gemma stores it in bfloat16, which knows nothing between 1 and 1.0078."""
    norm = RMSNorm("norm", 4, 0.0, torch.bfloat16, offset=1.0)
    norm.weight.copy_(torch.tensor([0.0, 2.0**-9, -(2.0**-10), 0.5]))
    norm.finish()
    assert norm.weight.tolist() == [1.0, 1 + 2.0**-9, 1 - 2.0**-10, 1.5]
    x = torch.tensor([[64.0, -64.0, 64.0, 64.0]], dtype=torch.bfloat16)
    assert norm.forward(x).tolist() == (torch.tensor([[1.0, -1.0, 1.0, 1.0]]) * norm.weight).bfloat16().tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tiny, dtype):
    """Logits within a few roundings of the float32 model's, at one rank and at two."""
    folder, model = tiny("qwen3")
    for size in (1, 2):
        group = make_group(folder, size, dtype=dtype)
        _, [logits] = group.call("step_with_logits", one_prompt(PROMPTS[2]))
        expected = reference_logits(model, PROMPTS[2])[-1]
        assert torch.cosine_similarity(torch.from_numpy(logits[0]), expected, dim=0) > 0.999

"""Random checkpoints of every family, made by transformers, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # weights large enough for answers to differ, and to be far from ties
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 20.0,
    },
}


def save_tiny(folder: Path, family: str, **changes: Any) -> Any:
    """A random model of a family in `folder`, every parameter away from its neutral value; returns it."""
    torch.manual_seed(7)
    fields = TINY | FAMILIES[family] | changes
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(ids)])).logits[0]


def reference_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Without its cache, so that nothing but the forward pass is compared."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def assert_greedy(model: Any, prompt: Sequence[int], output: Sequence[int], num_tokens: int) -> None:
    """`output` is reference_greedy's, token for token: each is the best after those before it. One forward pass."""
    assert len(output) == num_tokens
    logits = reference_logits(model, [*prompt, *output[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(output)

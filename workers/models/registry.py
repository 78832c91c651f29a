"""Which file builds which architecture, and the one way to build and load a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import init_empty_weights

from orcaserve.workers.errors import ModelLoadError
from orcaserve.workers.models import gemma3, llama, mistral, qwen2, qwen3
from orcaserve.workers.models.config import ModelConfig
from orcaserve.workers.models.decoder import Decoder, Setup
from orcaserve.workers.sharding import RankShard, rank_shards
from orcaserve.workers.weights import Checkpoint, load

FAMILIES: dict[str, Callable[[Setup], Decoder]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    "Gemma3ForCausalLM": gemma3.build,
}


def shards_of(config: ModelConfig, size: int) -> list[RankShard]:
    """What each of `size` ranks holds. Raises ShardingError."""
    return rank_shards(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        size=size,
    )


def load_model(setup: Setup, model_dir: Path) -> Decoder:
    """One rank's part of the model, built without memory and filled from the checkpoint. Raises ModelLoadError."""
    refuse_unknown(setup.config, model_dir)
    checkpoint = Checkpoint(model_dir)
    with init_empty_weights():
        model = FAMILIES[setup.config.architecture](setup)
    load(model, checkpoint, setup.device, "lm_head.weight" if setup.config.tie_word_embeddings else None)
    return model.eval()


def refuse_unknown(config: ModelConfig, model_dir: Path) -> None:
    if config.architecture not in FAMILIES:
        reason = f"architecture {config.architecture!r} is not among {', '.join(FAMILIES)}"
        raise ModelLoadError(str(model_dir / "config.json"), "", reason)


def model_dtype(config: ModelConfig, wanted: str) -> torch.dtype:
    """`wanted` is a name of WorkerConfig.dtype; "auto" is the checkpoint's own."""
    return config.dtype if wanted == "auto" else getattr(torch, wanted)

"""The sizes of a dense decoder that decide how long a step takes, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Names as in config.json."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    bytes_per_value: int = 2  # bf16

    @property
    def layer_params(self) -> int:
        """Weights of the seven linears of all layers."""
        q = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """All weights that lie in memory; an untied model has the embedding beside the head."""
        tables = 1 if self.tie_word_embeddings else 2
        return (self.layer_params + tables * self.head_params) * self.bytes_per_value

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Heads of K and V on the fullest rank; replicated where there are more ranks than heads."""
        return -(-self.num_key_value_heads // tensor_parallel_size)

    def kv_bytes_per_token(self, tensor_parallel_size: int) -> int:
        """KV cache of one token on one rank, all layers."""
        heads = self.kv_heads_per_rank(tensor_parallel_size)
        return 2 * heads * self.head_dim * self.num_hidden_layers * self.bytes_per_value

    def num_kv_blocks(self, memory_bytes: float, tensor_parallel_size: int, block_size: int, share: float) -> int:
        """KV blocks that fit beside the weights in `share` of each device's memory; 0 where the weights do not fit."""
        left = memory_bytes * share - self.weight_bytes / tensor_parallel_size - 2e9  # activations, CUDA context
        return max(0, int(left // (self.kv_bytes_per_token(tensor_parallel_size) * block_size)))


# meta-llama/Meta-Llama-3-70B and -8B, config.json of their repositories.
LLAMA_3_70B = ModelShape(
    name="llama-3-70b",
    num_hidden_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
)
LLAMA_3_8B = ModelShape(
    name="llama-3-8b",
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
BUILT_IN = {shape.name: shape for shape in (LLAMA_3_70B, LLAMA_3_8B)}


def load_shape(model: str) -> ModelShape:
    """A built-in name, a config.json, or a folder with one."""
    if model in BUILT_IN:
        return BUILT_IN[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return ModelShape(
            name=path.parent.name or str(path),
            num_hidden_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bytes_per_value=4 if "32" in str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") else 2,
        )
    except OSError as error:
        raise ValueError(f"model {model!r}: neither one of {sorted(BUILT_IN)} nor a config.json: {error}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"model {model!r}: {path} lacks or garbles {error}") from error

"""What our models need to know of a checkpoint's config.json, checked."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from orcaserve.workers.errors import ModelLoadError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields that all families have; what one family alone has, it reads from `hf`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    hf: SimpleNamespace  # the fields of transformers' config object


def read_config(model_dir: Path, cache_dir: Path | None = None) -> ModelConfig:
    """Raises ModelLoadError for a config that is missing, broken or of a kind that cannot be served."""
    file = model_dir / "config.json"
    raw = _read_json(file)
    architectures = raw.get("architectures") or []
    if len(architectures) != 1:
        raise ModelLoadError(str(file), "", f"one entry in 'architectures' is needed, not {architectures!r}")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "of an unnamed kind")
        raise ModelLoadError(str(file), "", f"quantisation {method!r} is not supported; use an unquantised checkpoint")
    try:
        hf = _completed(file, cache_dir or Path.home() / ".cache" / "orcaserve" / "configs")
        return ModelConfig(
            architecture=architectures[0],
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            rms_norm_eps=hf.rms_norm_eps,
            tie_word_embeddings=hf.tie_word_embeddings,
            max_position_embeddings=hf.max_position_embeddings,
            eos_token_ids=_eos_token_ids(model_dir, hf.eos_token_id),
            dtype=_dtype(file, hf.dtype),
            hf=hf,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(str(file), "", f"{type(error).__name__}: {error}") from error


def _completed(file: Path, cache_dir: Path) -> SimpleNamespace:
    """A config.json with the defaults of its kind, as transformers knows them.

    Importing transformers takes 2 s of CPU, a third of a worker's start: what it said once is kept. Raises ValueError.
    """
    version = importlib.metadata.version("transformers")
    known = cache_dir / f"{hashlib.sha256(version.encode() + file.read_bytes()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return SimpleNamespace(**json.loads(known.read_bytes()))

    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        content = AutoConfig.from_pretrained(file.parent).to_json_string(use_diff=False)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    with contextlib.suppress(OSError):  # a home that cannot be written to costs time, no more
        known.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=known.parent, delete=False) as new:
            new.write(content)
        Path(new.name).replace(known)
    return SimpleNamespace(**json.loads(content))


def _dtype(file: Path, dtype: Any) -> torch.dtype:
    """The checkpoint's own dtype; a config that does not say is float32, as in transformers."""
    name = str(dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelLoadError(str(file), "", f"dtype {name!r} is not among {', '.join(DTYPES)}")
    return DTYPES[name]


def _eos_token_ids(model_dir: Path, fallback: int | list[int] | None) -> tuple[int, ...]:
    """generation_config.json has the last word: chat models list their end-of-turn token only there."""
    file = model_dir / "generation_config.json"
    ids = _read_json(file).get("eos_token_id", fallback) if file.is_file() else fallback
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(file), "", str(error)) from error
    if not isinstance(content, dict):
        raise ModelLoadError(str(file), "", "not a JSON object")
    return content

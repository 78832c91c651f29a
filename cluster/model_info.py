"""What everyone but the workers must know of a model, read from its directory without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec


class ModelNotFound(ValueError):
    """The model's directory is missing or lacks a file; one line for the operator."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a Hugging Face model directory."""

    model_dir: str
    served_names: tuple[str, ...]  # the first one is what answers carry
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    max_model_len: int  # what the operator asked for, at most what the model was made for
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    generation_defaults: dict[str, float | int]  # sampling values of generation_config.json

    @property
    def name(self) -> str:
        return self.served_names[0]

    @property
    def tokenizer_file(self) -> str:
        return str(Path(self.model_dir) / "tokenizer.json")


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def read_model_info(
    model_dir: str | Path, served_names: tuple[str, ...] = (), max_model_len: int | None = None
) -> ModelInfo:
    """Raises ModelNotFound when a file is missing, ValueError when `max_model_len` is more than the model can."""
    folder = Path(model_dir)
    config = _read_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json")
    generation = _read_json(folder / "generation_config.json", optional=True)
    tokenizer = _read_json(folder / "tokenizer_config.json", optional=True)
    positions = int(config.get("max_position_embeddings", 2048))
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(f"--max-model-len: {max_model_len} is more than the {positions} positions of {folder.name}")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelInfo(
        model_dir=str(folder.resolve()),
        served_names=served_names or (folder.resolve().name,),
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=positions,
        max_model_len=max_model_len or positions,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        bos_token_id=config.get("bos_token_id"),
        chat_template=_chat_template(folder, tokenizer),
        generation_defaults={
            key: generation[key] for key in _SAMPLING_DEFAULTS if isinstance(generation.get(key), int | float)
        },
    )


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelNotFound(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{file}: {error}") from None


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text()
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template

"""What everyone but the workers must know of a model, read from its directory without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec


class BadModel(ValueError):
    """The model's directory lacks a file or has a broken one; one line for the operator."""


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
    special_tokens: dict[str, str]  # bos_token, eos_token and the like, by the names that chat templates use
    generation_defaults: dict[str, float | int]  # sampling values of generation_config.json

    @property
    def name(self) -> str:
        return self.served_names[0]

    @property
    def tokenizer_file(self) -> str:
        return str(Path(self.model_dir) / "tokenizer.json")


class _Config(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int = 2048
    architectures: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


class _SamplingDefaults(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class _GenerationConfig(_SamplingDefaults):
    eos_token_id: int | list[int] | msgspec.UnsetType | None = msgspec.UNSET


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None


_T = TypeVar("_T")


def read_model_info(
    model_dir: str | Path, served_names: tuple[str, ...] = (), max_model_len: int | None = None
) -> ModelInfo:
    """Raises BadModel when a file is missing or broken, ValueError when `max_model_len` is more than the model can."""
    folder = Path(model_dir)
    config = _read_json(folder / "config.json", _Config)
    if not (folder / "tokenizer.json").is_file():
        raise BadModel(f"{folder} has no tokenizer.json")
    generation = _read_json(folder / "generation_config.json", _GenerationConfig, "{}")
    positions = config.max_position_embeddings
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(f"--max-model-len: {max_model_len} is more than the {positions} positions of {folder.name}")
    eos = config.eos_token_id if generation.eos_token_id is msgspec.UNSET else generation.eos_token_id
    return ModelInfo(
        model_dir=str(folder.resolve()),
        served_names=served_names or (folder.resolve().name,),
        architecture=(config.architectures or ["unknown"])[0],
        vocab_size=config.vocab_size,
        max_position_embeddings=positions,
        max_model_len=max_model_len or positions,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=config.bos_token_id,
        chat_template=_chat_template(folder),
        special_tokens=_special_tokens(folder),
        generation_defaults={
            name: value
            for name in _SamplingDefaults.__struct_fields__
            if (value := getattr(generation, name)) is not None
        },
    )


def _read_json(file: Path, kind: type[_T], default: str | None = None) -> _T:
    try:
        text = file.read_text() if default is None or file.exists() else default
        return msgspec.convert(json.loads(text), kind)
    except FileNotFoundError:
        raise BadModel(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise BadModel(f"{file}: {error}") from None


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text()
        except (OSError, ValueError) as error:
            raise BadModel(f"{file}: {error}") from None
    template = _read_json(folder / "tokenizer_config.json", _TokenizerConfig, "{}").chat_template
    if isinstance(template, list):
        return next((named.template for named in template if named.name == "default"), None)
    return template


def _special_tokens(folder: Path) -> dict[str, str]:
    """Each is a text, or an object with one as its content."""
    content = _read_json(folder / "tokenizer_config.json", dict[str, Any], "{}")
    tokens = {name: value for name, value in content.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

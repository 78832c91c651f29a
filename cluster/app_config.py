"""The operator's choices for the HTTP surface. ServeConfig inherits them, so that every one is a flag."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def hashed_key(key: str) -> str:
    """A key as it is kept and handed on from process to process: `sha256:` and the hash. A hash stays as it is."""
    if key.startswith("sha256:"):
        if len(key) != 71 or not set(key[7:]) <= set("0123456789abcdef"):
            raise ValueError("after sha256: come 64 hexadecimal digits, in lower case")
        return key
    if not key:
        raise ValueError("an API key must not be empty")
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _hashed_keys(value: Any) -> Any:
    keys = (value,) if isinstance(value, str) else value
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise ValueError("keys are strings")  # YAML reads a key of digits as a number: it wants quotes
    return tuple(hashed_key(key) for key in keys)


ApiKeys = Annotated[tuple[str, ...], BeforeValidator(_hashed_keys)]


class ApiLimits(BaseModel):
    """They bound what one request can cost before the scheduler sees it. Field names are the flags' names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_body_bytes: int = Field(default=8 * 2**20, gt=0, description="larger request bodies are refused unread (413)")
    max_prompt_chars: int = Field(default=4_000_000, gt=0, description="of all prompts of one request together")
    max_messages: int = Field(default=4096, gt=0, description="of one conversation")
    max_choices: int = Field(default=128, gt=0, description="n or best_of, times the prompts of one request")
    max_stop_strings: int = Field(default=16, ge=0)
    max_stop_chars: int = Field(default=1024, gt=0, description="of one stop string")
    max_stop_token_ids: int = Field(default=128, ge=0)
    max_logprobs: int = Field(default=20, ge=0, description="highest logprobs, top_logprobs and prompt_logprobs")
    max_logit_bias: int = Field(default=1024, ge=0, description="entries of logit_bias")
    max_bad_words: int = Field(default=128, ge=0, description="entries of bad_words")
    max_bad_word_chars: int = Field(default=256, gt=0, description="of one of them")
    max_schema_bytes: int = Field(
        default=64 * 2**10, gt=0, description="of a schema, pattern, grammar or list of choices"
    )
    max_schema_depth: int = Field(default=32, gt=0, description="nesting of a JSON schema")
    grammar_timeout_s: float = Field(default=5.0, gt=0, description="a grammar that compiles longer is refused")
    body_timeout_s: float = Field(default=30.0, gt=0, description="a request body must be there by then (408)")


class AppConfig(ApiLimits):
    """Limits, and what a router needs to know beside the model."""

    api_key: ApiKeys = Field(default=(), repr=False, description="clients must present one of these; repeatable")
    api_key_file: Path | None = Field(default=None, description="more such keys, one a line, as a Secret is mounted")
    tenants_file: Path | None = Field(default=None, description="YAML: tenants with their keys, weights and limits")
    log_format: Literal["text", "json"] = Field(default="text", description="of the line that each request leaves")
    log_prompts: bool = Field(default=False, description="put prompts into the log")
    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^/]", description="send OpenTelemetry spans there, as http://host:4318"
    )

    @property
    def wants_key(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None or self.tenants_file is not None

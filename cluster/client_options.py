"""Parameters that the client's methods take, with OpenAI's and vLLM's names; the server checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class GenerationOptions(TypedDict, total=False):
    """For chat and completions alike."""

    model: str
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    min_tokens: int
    logit_bias: Mapping[str, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    priority: int
    cache_salt: str
    deadline_ms: int
    truncate_prompt_tokens: int
    add_special_tokens: bool
    user: str
    stream_options: Mapping[str, Any]
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    prompt_logprobs: int


class ChatOptions(GenerationOptions, total=False):
    """For chat."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class CompletionOptions(GenerationOptions, total=False):
    """For completions."""

    best_of: int
    echo: bool
    logprobs: int

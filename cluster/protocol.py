"""The fields that every generation request shares, with OpenAI's and vLLM's names, types and ranges.

Types are strict (no "2" for 2, no true for 1) and a JSON null means "left out". Unknown fields are kept in
`model_extra`, so that the router can name them in a response header. Checks that need the model (vocabulary, context
length) or the operator's limits are in limits.py; these models know only what the protocol itself says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

INT64_MAX = 2**63 - 1
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
NonEmptyString = Annotated[str, StringConstraints(min_length=1)]


class ApiModel(BaseModel):
    """Base of request objects."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk (vLLM's extension).")


class JsonSchemaFormat(ApiModel):
    name: NonEmptyString
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ApiModel):
    """Exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: NonEmptyString | None = None
    choice: Annotated[list[NonEmptyString], Field(min_length=1)] | None = None
    grammar: NonEmptyString | None = Field(None, description="EBNF")


class GenerationRequest(ApiModel):
    """What /v1/chat/completions and /v1/completions have in common."""

    # Fields of OpenAI's or vLLM's that change the answer and that we do not have: refused by name unless the value
    # is one that asks for nothing.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "repetition_detection": (),
        "spaces_between_special_tokens": (True,),
        "truncation_side": ("left",),
        "logprob_token_ids": ([],),
        "return_token_offsets": (False,),
        "return_prompt_text": (False,),
        "stream_interval": (1,),
        "watermarking": (False,),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json_object": (False,),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
        "thinking_token_budget": (),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, le=INT64_MAX)
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 and -1: no limit.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=INT64_MAX)] | None = None
    stop: NonEmptyString | list[NonEmptyString] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[NonEmptyString] | None = Field(
        None, description="Never completed, with a space in front or without; a word may be several tokens."
    )
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Lower goes first.")
    cache_salt: NonEmptyString | None = Field(None, description="Cached prompt blocks are shared under one salt only.")
    deadline_ms: Annotated[int, Field(gt=0, le=2**40)] | None = Field(
        None, description="Give the request up if its first token is not there in time."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep the last ones.")
    add_special_tokens: bool | None = None
    user: str | None = None
    return_token_ids: bool | None = Field(None, description="Token ids of prompt and output beside the text.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Tokens in logprobs as `token_id:ID`.")
    resume_token_ids: dict[str, TokenIds] | None = Field(
        None,
        description="Go on with a broken stream: choice index -> the token ids received so far. Only these choices "
        "are generated, and the answer holds only what comes after those ids. Send the same seed as the first time.",
    )


def ignored_fields(request: GenerationRequest) -> list[str]:
    """Unknown fields, as dotted paths, in a form that is safe in a header."""
    found = [*(request.model_extra or {})]
    for name in ("stream_options", "response_format", "structured_outputs"):
        part = getattr(request, name)
        found += [f"{name}.{key}" for key in (part.model_extra or {})] if part is not None else []
    return [
        "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64]) for name in found[:32]
    ]

"""POST /v1/completions, /tokenize and /detokenize: endpoints that take plain prompts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from orcaserve.cluster.protocol import ApiModel, GenerationRequest, TokenIds
from orcaserve.cluster.protocol_chat import Message


def _prompt_kind(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "<text>"
    if not prompt or isinstance(prompt[0], int):
        return "<ids>"
    return "<lists>" if isinstance(prompt[0], list) else "<texts>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<lists>")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none",),
        "prompt_embeds": (),
        "messages": (),
    }

    prompt: Prompt
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list: one entry is one prompt."""
        return cast("Any", self.prompt if _prompt_kind(self.prompt) in ("<texts>", "<lists>") else [self.prompt])


class TokenizeRequest(ApiModel):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None

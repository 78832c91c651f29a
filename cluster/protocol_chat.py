"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orcaserve.cluster.protocol import ApiModel, GenerationRequest

# What a message may carry that we cannot honour, with the values that ask for nothing.
_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "tool_call_id": (None,),
    "audio": (None,),
}


class TextPart(ApiModel):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            raise PydanticCustomError(
                "unsupported_part", "only content parts of type 'text' are supported; this server opens no URL or file"
            )
        return part


def _content_kind(content: Any) -> str | None:
    if content is None:
        return "<null>"
    return "<parts>" if isinstance(content, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("<parts>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(_content_kind),
]


class Message(ApiModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        for field, harmless in _UNSUPPORTED_IN_MESSAGE.items():
            if field in message and message[field] not in harmless:
                raise PydanticCustomError("unsupported_field", "'{field}' is not supported", {"field": field})
        return message

    @property
    def text(self) -> str:
        """The content as one string: text parts are joined as they stand, null is empty."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatCompletionRequest(GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "echo": (False,),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "moderation": (),
        "best_of": (1,),
        "suffix": (),
        "prompt": (),
    }

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens; wins over it.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Default true, unless the last turn is continued.")
    continue_final_message: bool | None = None

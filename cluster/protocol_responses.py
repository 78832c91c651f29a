"""What comes back: OpenAI's response objects, read by the client SDK and written into the OpenAPI document.

The router does not build these for every token (sse.py writes the chunks' bytes); a test parses what it sends with
these models and with the openai package's own. pydantic alone is needed here, since the client imports it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """Base: fields that a newer server adds are kept."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = 0


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(ResponseModel):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


FinishReason = Literal["stop", "length", "content_filter", "tool_calls", "abort", "timeout"]


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].message.content or ""


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        """What this chunk adds to its choice; empty for the first, the last and the usage chunk."""
        return (self.choices[0].delta.content or "") if self.choices else ""


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(ResponseModel):
    """Also the chunk of a stream: OpenAI uses one shape for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text if self.choices else ""


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "orcaserve"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(ResponseModel):
    prompt: str


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(ResponseModel):
    error: ErrorDetail


class VersionResponse(ResponseModel):
    version: str


class HealthResponse(ResponseModel):
    status: str
    reason: str | None = None


class GroupResponse(ResponseModel):
    group_id: int
    state: str
    phase: str = ""
    num_kv_blocks: int = 0
    node_ids: list[str] = []  # of its ranks
    error: str = ""  # why it died last


class ClusterStatusResponse(ResponseModel):
    """One consistent look at the service; the scheduler's figures are engine.stats.SchedulerStats."""

    ready: bool
    draining: bool
    groups: list[GroupResponse]
    scheduler: dict[str, Any]
    num_routers: int
    uptime_s: float

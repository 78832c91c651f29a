"""What the clients ask for, and how an answer is read: the requests as data. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from orcaserve.cluster.client_errors import IncompleteStream, error_of
from orcaserve.cluster.protocol_responses import (
    ChatCompletion,
    ClusterStatusResponse,
    Completion,
    DetokenizeResponse,
    HealthResponse,
    ModelList,
    TokenizeResponse,
)

Answer = TypeVar("Answer", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """One request whose answer comes whole. Without a body it is a GET."""

    answer: type[Answer]
    path: str
    body: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    def read(self, response: httpx.Response) -> Answer:
        """The answer as its type. Raises ApiError, and IncompleteStream for what is none."""
        if not response.is_success:
            raise error_of(response)
        try:
            return self.answer.model_validate_json(response.content)
        except ValidationError as error:
            raise IncompleteStream(f"the answer is not what the API says: {error.errors()[0]['msg']}") from None


MODELS = Call(ModelList, "/v1/models")
HEALTH = Call(HealthResponse, "/health")
READY = Call(HealthResponse, "/ready")
CLUSTER = Call(ClusterStatusResponse, "/cluster")


def chat(messages: Messages, options: Mapping[str, Any]) -> Call[ChatCompletion]:
    return Call(ChatCompletion, CHAT_PATH, chat_body(messages, options))


def completion(prompt: Prompt, options: Mapping[str, Any]) -> Call[Completion]:
    return Call(Completion, COMPLETION_PATH, completion_body(prompt, options))


def tokenize(text: str | Messages, options: Mapping[str, Any]) -> Call[TokenizeResponse]:
    field = {"prompt": text} if isinstance(text, str) else {"messages": [dict(message) for message in text]}
    return Call(TokenizeResponse, "/tokenize", {**field, **options})


def detokenize(tokens: Sequence[int], options: Mapping[str, Any]) -> Call[DetokenizeResponse]:
    return Call(DetokenizeResponse, "/detokenize", {"tokens": list(tokens), **options})


def chat_body(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [dict(message) for message in messages], **options}


def completion_body(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a completion request."""
    if isinstance(prompt, str):
        return {"prompt": prompt, **options}
    return {"prompt": [part if isinstance(part, str | int) else list(part) for part in prompt], **options}

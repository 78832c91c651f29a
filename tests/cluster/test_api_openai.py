"""The official client, and its own types, on everything that the server sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from orcaserve.cluster import protocol_responses as ours
from orcaserve.cluster.app_config import AppConfig
from tests.cluster.live import LiveServer

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "SAY:Hello there, 🧪 world"}]
SAID = "Hello there, 🧪 world"


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


def test_chat_and_stream(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        model=server.model.name, messages=HI, temperature=0, max_completion_tokens=40
    )
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(
        model=server.model.name, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )  # type: ignore[union-attr]


def test_chat_logprobs_and_extras(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        model=server.model.name,
        messages=HI,
        logprobs=True,
        top_logprobs=3,
        n=2,
        seed=1,
        user="someone",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "return_token_ids": True},
        max_tokens=12,
    )
    assert len(answer.choices) == 2
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(bytes(entry.bytes or ()).decode("utf-8", "ignore") for entry in content[:3]) == SAID[:12]
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_the_stream_helper(client: openai.OpenAI, server: LiveServer) -> None:
    with client.chat.completions.stream(model=server.model.name, messages=HI) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == SAID
        assert stream.get_final_completion().choices[0].message.content == SAID


def test_completions(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(
        model=server.model.name, prompt=["SAY:a", "SAY:b"], echo=True, logprobs=1, max_tokens=3
    )
    assert [choice.text for choice in answer.choices] == ["SAY:aa", "SAY:bb"]
    stream = client.completions.create(model=server.model.name, prompt="SAY:one two", stream=True, stop=["two"])
    assert "".join(chunk.choices[0].text for chunk in stream) == "one "


def test_models_and_errors(client: openai.OpenAI, server: LiveServer, make_server: Callable[..., LiveServer]) -> None:
    assert [model.id for model in client.models.list()] == [server.model.name]
    assert client.models.retrieve(server.model.name).owned_by == "orcaserve"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=server.model.name, messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    locked = make_server(AppConfig(api_key=("k",)))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=locked.url + "/v1", api_key="k").models.list().data


def test_an_error_in_a_stream_reaches_the_caller(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(parrot={"pace_s": 0.02})
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
    stream = client.completions.create(
        model=server.model.name, prompt="x", stream=True, max_tokens=200, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.worker.fail = "a fault"
    with pytest.raises(openai.APIError, match="a fault"):
        list(stream)


def test_structured_output_parses_into_a_type(client: openai.OpenAI, server: LiveServer) -> None:
    class City(BaseModel):
        name: str
        size: int

    messages: Any = [{"role": "user", "content": 'SAY:{"name": "Berlin", "size": 4}'}]
    parsed = client.chat.completions.parse(model=server.model.name, messages=messages, response_format=City)
    assert parsed.choices[0].message.parsed == City(name="Berlin", size=4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"return_token_ids": True}])
def test_their_types_and_ours_accept_every_chat_object(
    server: LiveServer, stream: bool, fields: dict[str, Any]
) -> None:
    body = {"messages": HI, "max_completion_tokens": 12, **fields}
    if stream:
        for event in server.events("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})[:-1]:
            TypeAdapter(ChatCompletionChunk).validate_python(json.loads(event), strict=False)
            ours.ChatCompletionChunk.model_validate_json(event)
    else:
        answer = server.client.post("/v1/chat/completions", json=body)
        ChatCompletion.model_validate(answer.json(), strict=False)
        ours.ChatCompletion.model_validate_json(answer.content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "echo": True}, {"prompt_logprobs": 1}])
def test_their_types_and_ours_accept_every_completion_object(
    server: LiveServer, stream: bool, fields: dict[str, Any]
) -> None:
    body = {"prompt": "SAY:one two", **fields}
    if stream and "prompt_logprobs" in fields:
        assert server.client.post("/v1/completions", json=body | {"stream": True}).status_code == 400
    elif stream:
        for event in server.events("/v1/completions", body)[:-1]:
            # Their type forgets that a chunk's finish_reason may be null, as their server sends it.
            chunk = json.loads(event)
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate(chunk)
            ours.Completion.model_validate_json(event)
    else:
        answer = server.client.post("/v1/completions", json=body)
        Completion.model_validate(answer.json())
        ours.Completion.model_validate_json(answer.content)


def test_models_and_usage_are_theirs_too(server: LiveServer) -> None:
    Model.model_validate(server.client.get("/v1/models").json()["data"][0])
    CompletionUsage.model_validate(server.complete("SAY:x").json()["usage"])

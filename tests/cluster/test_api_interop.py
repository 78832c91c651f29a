"""Frameworks that many people call a model through, unchanged: LangChain's ChatOpenAI and LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai.types import CompletionUsage
from pydantic import BaseModel

from orcaserve.cluster.app_config import AppConfig
from tests.cluster.live import LiveServer

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "SAY:Hello there, 🧪 world"}]
SAID = "Hello there, 🧪 world"
CITY: Any = [{"role": "user", "content": 'SAY:{"name": "Berlin", "size": 4}'}]


class City(BaseModel):
    name: str
    size: int


@pytest.fixture(scope="module")
def paced(make_server: Callable[..., LiveServer]) -> LiveServer:
    return make_server(parrot={"pace_s": 0.05})  # a faster one's tokens would all go out in one chunk


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
        return pytest.importorskip("litellm", reason="230 MB with boto3: pip install 'orcaserve[interop]'")


@pytest.fixture
def usage(server: LiveServer) -> CompletionUsage:
    """What the server says itself that the answer costs."""
    return CompletionUsage.model_validate(
        server.client.post("/v1/chat/completions", json={"messages": HI}).json()["usage"]
    )


class TestLangChain:
    @pytest.fixture
    def chat(self, server: LiveServer) -> Callable[..., ChatOpenAI]:
        def make(**options: Any) -> ChatOpenAI:
            named: dict[str, Any] = {"base_url": server.url + "/v1", "model": server.model.name, "api_key": "any"}
            return ChatOpenAI(**named | {"temperature": 0, "max_retries": 0} | options)

        return make

    def test_chat(self, chat: Callable[..., ChatOpenAI], usage: CompletionUsage) -> None:
        answer = chat(max_tokens=40).invoke(HI)
        assert answer.content == SAID
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == usage.prompt_tokens
        assert answer.usage_metadata["output_tokens"] == usage.completion_tokens
        assert answer.usage_metadata["total_tokens"] == usage.total_tokens

    def test_options(self, chat: Callable[..., ChatOpenAI]) -> None:
        model = chat(n=2, stop=["world"], logprobs=True, top_logprobs=2, seed=1, extra_body={"top_k": 3})
        [choices] = model.generate([[SystemMessage("Be brief."), HumanMessage("SAY:" + SAID)]]).generations
        assert [choice.text for choice in choices] == ["Hello there, 🧪 ", "1 Hello there, 🧪 "]
        message = choices[0].message  # type: ignore[union-attr]
        assert isinstance(message, AIMessage)
        assert all(len(entry["top_logprobs"]) == 2 for entry in message.response_metadata["logprobs"]["content"])

    def test_stream(self, chat: Callable[..., ChatOpenAI], paced: LiveServer, usage: CompletionUsage) -> None:
        chunks = list(chat(base_url=paced.url + "/v1", stream_usage=True).stream(HI))
        assert len([chunk for chunk in chunks if chunk.content]) > 2
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert isinstance(whole, AIMessageChunk)
        assert whole.content == SAID
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["total_tokens"] == usage.total_tokens

    def test_asynchronous(self, chat: Callable[..., ChatOpenAI]) -> None:
        async def use() -> tuple[Any, list[Any]]:
            model = chat()
            return (await model.ainvoke(HI)).content, [chunk.content async for chunk in model.astream(HI)]

        answer, chunks = asyncio.run(use())
        assert answer == "".join(chunks) == SAID

    def test_structured_output(self, chat: Callable[..., ChatOpenAI]) -> None:
        assert chat().with_structured_output(City, method="json_schema").invoke(CITY) == City(name="Berlin", size=4)
        assert chat().with_structured_output(City, method="json_mode").invoke(CITY) == City(name="Berlin", size=4)

    def test_errors(self, chat: Callable[..., ChatOpenAI], make_server: Callable[..., LiveServer]) -> None:
        with pytest.raises(openai.NotFoundError, match="model"):
            chat(model="nope").invoke(HI)
        with pytest.raises(openai.BadRequestError) as bad:
            chat(temperature=9).invoke(HI)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as tools:
            chat().bind_tools([City]).invoke(HI)
        assert tools.value.param == "tools"
        locked = make_server(AppConfig(api_key=("k",)))
        with pytest.raises(openai.AuthenticationError):
            chat(base_url=locked.url + "/v1").invoke(HI)
        assert chat(base_url=locked.url + "/v1", api_key="k").invoke(HI).content == SAID


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of its own types
class TestLiteLLM:
    @pytest.fixture
    def to(self, server: LiveServer) -> dict[str, Any]:
        """How its users name a server."""
        name = f"openai/{server.model.name}"
        return {"model": name, "api_base": server.url + "/v1", "api_key": "any", "temperature": 0, "num_retries": 0}

    def test_chat(self, litellm: Any, to: dict[str, Any], usage: CompletionUsage) -> None:
        answer = litellm.completion(messages=HI, max_completion_tokens=40, **to)
        assert answer.choices[0].message.content == SAID
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == usage.prompt_tokens
        assert answer.usage.completion_tokens == usage.completion_tokens

    def test_options(self, litellm: Any, to: dict[str, Any]) -> None:
        fields = {"n": 2, "stop": ["world"], "logprobs": True, "top_logprobs": 2, "seed": 1, "top_k": 3}
        answer = litellm.completion(messages=HI, **fields, **to)
        assert [choice.message.content for choice in answer.choices] == ["Hello there, 🧪 ", "1 Hello there, 🧪 "]
        assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content)

    def test_stream(self, litellm: Any, to: dict[str, Any], paced: LiveServer, usage: CompletionUsage) -> None:
        to["api_base"] = paced.url + "/v1"
        chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **to))
        texts = [text for chunk in chunks if chunk.choices and (text := chunk.choices[0].delta.content)]
        assert len(texts) > 2
        assert "".join(texts) == SAID
        assert chunks[-1].usage.total_tokens == usage.total_tokens
        assert "stop" in [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]

    def test_asynchronous(self, litellm: Any, to: dict[str, Any]) -> None:
        async def use() -> tuple[Any, list[Any]]:
            answer = await litellm.acompletion(messages=HI, **to)
            stream = await litellm.acompletion(messages=HI, stream=True, **to)
            return answer.choices[0].message.content, [chunk.choices[0].delta.content or "" async for chunk in stream]

        answer, chunks = asyncio.run(use())
        assert answer == "".join(chunks) == SAID

    def test_text_completion(self, litellm: Any, to: dict[str, Any]) -> None:
        to["model"] = "text-completion-" + to["model"]
        answer = litellm.text_completion(prompt="SAY:one two", stop=["two"], **to)
        assert answer.choices[0].text == "one "
        stream = litellm.text_completion(prompt="SAY:one two", stop=["two"], stream=True, **to)
        assert "".join(chunk.choices[0].text or "" for chunk in stream) == "one "

    def test_structured_output(self, litellm: Any, to: dict[str, Any]) -> None:
        answer = litellm.completion(messages=CITY, response_format=City, **to)
        assert City.model_validate_json(answer.choices[0].message.content) == City(name="Berlin", size=4)

    def test_errors(self, litellm: Any, to: dict[str, Any], make_server: Callable[..., LiveServer]) -> None:
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(messages=HI, **to | {"model": "openai/nope"})
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            litellm.completion(messages=HI, **to | {"temperature": 9})
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=[{"role": "user", "content": "word " * 1000}], **to)
        locked = make_server(AppConfig(api_key=("k",)))
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(messages=HI, **to | {"api_base": locked.url + "/v1"})

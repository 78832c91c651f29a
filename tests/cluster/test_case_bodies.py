"""The cases of faults.jsonl about bodies, prompts and messages: a 4xx that names the field, and no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import MAX_MODEL_LEN
from tests.cluster.live import LiveServer
from tests.cluster.refusals import CHAT, JSON, TEXT, refused

pytestmark = pytest.mark.usefixtures("neighbour")


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"hi"', b"{bad", b"", b"\xff\xfe", b"[" * 5000, b'{"a":NaN}'])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_case_04_bodies_that_are_no_object(server: LiveServer, path: str, body: bytes) -> None:
    refused(server.client.post(path, content=body, headers=JSON), None)


def test_case_04_without_content_type(server: LiveServer) -> None:
    refused(server.client.post(CHAT, content=b'{"messages":[]}'), None, 415)


def test_case_04_errors_do_not_echo_the_input(server: LiveServer) -> None:
    secret = "correct horse battery staple"
    for body in (
        {"messages": secret},
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"prompt": {"a": secret}},
        {"prompt": "x", "temperature": secret},
        {"prompt": "x", "logit_bias": {secret: 1}},
        {"prompt": "x", "response_format": {"type": secret}},
        {"model": secret, "prompt": "x"},
    ):
        response = server.client.post(CHAT if "messages" in body else TEXT, json=body)
        assert 400 <= response.status_code < 500
        assert secret not in response.text


def test_case_05_context_length(server: LiveServer) -> None:
    def ids(num: int) -> list[int]:
        return [504] * num

    def send(num: int, **fields: Any) -> httpx.Response:
        return server.complete(ids(num), **fields)

    limit = MAX_MODEL_LEN
    for response in (
        send(limit + 100),
        send(limit),
        send(10, max_tokens=limit),
        server.complete(ids(limit + 100), max_tokens=1),
    ):
        message = refused(response, "prompt", code="context_length_exceeded")
        assert str(limit) in message
        assert "-" not in message
    chat = server.chat("word " * (limit + 100))
    assert str(limit) in refused(chat, "messages", code="context_length_exceeded")
    assert send(limit - 1, max_tokens=1).json()["usage"]["completion_tokens"] == 1
    refused(send(10, max_tokens=-5), "max_tokens")
    refused(send(10, max_tokens=0), "max_tokens")


def test_case_06_scoring_a_prompt(server: LiveServer) -> None:
    answer = server.complete("The sky is blue", max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert choice["text"] == "The sky is blue"
    assert choice["logprobs"]["tokens"] == ["The", " sky", " is", " blue"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 10]
    assert answer["usage"]["completion_tokens"] == 0
    assert server.complete("SAY:ok").status_code == 200
    refused(server.chat("x", max_tokens=0), "max_tokens")
    refused(server.chat("x", max_completion_tokens=0), "max_completion_tokens")
    plain = server.complete("The sky", max_tokens=0, echo=True).json()["choices"][0]
    assert (plain["text"], plain["finish_reason"]) == ("The sky", "length")


def test_case_06_echo_with_an_answer(server: LiveServer) -> None:
    body = {"prompt": "SAY:one two", "echo": True, "logprobs": 0, "max_tokens": 10}
    choice = server.client.post(TEXT, json=body).json()["choices"][0]
    assert choice["text"] == "SAY:one twoone two"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "SAY:one twoone two<|im_end|>"
    assert logprobs["text_offset"][-1] == len(choice["text"])
    events = [json.loads(e)["choices"][0] for e in server.events(TEXT, body)[:-1]]
    assert "".join(e["text"] for e in events) == choice["text"]
    assert [t for e in events if e["logprobs"] for t in e["logprobs"]["tokens"]] == logprobs["tokens"]


@pytest.mark.parametrize("prompt", ["", [], [[]], ["ok", ""], [[504], []]])
def test_case_07_empty_prompts(server: LiveServer, prompt: Any) -> None:
    refused(server.complete(prompt, max_tokens=4), "prompt")
    assert server.complete("SAY:ok").status_code == 200


def test_case_10_messages(server: LiveServer) -> None:
    def send(*messages: Any) -> httpx.Response:
        return server.client.post(CHAT, json={"messages": list(messages), "max_tokens": 4})

    a, b = {"role": "user", "content": "A"}, {"role": "user", "content": "B"}
    assert send(a, {"role": "assistant", "content": ""}, b).status_code == 200
    assert send(a, {"role": "assistant", "content": None}, b).status_code == 200
    assert send(a, {"role": "assistant"}, b).status_code == 200
    assert send({"role": "assistant", "content": "Hello."}, b).status_code == 200
    parts = {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
    joined = {"role": "user", "content": "AB"}
    tokens = [server.client.post("/tokenize", json={"messages": [m]}).json()["tokens"] for m in (parts, joined)]
    assert tokens[0] == tokens[1]
    refused(send(a, {"role": "user", "content": None}), "messages[1].content")
    refused(send(a, {"role": "user"}), "messages[1].content")
    refused(send(a, {"role": "user", "content": 7}), "messages[1].content")
    refused(send(a, {"role": "user", "content": []}), "messages[1].content")
    refused(send(a, {"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text")
    refused(send(), "messages")
    refused(send({"role": "wizard", "content": "x"}), "messages[0].role")
    refused(send("x"), "messages[0]")
    refused(server.client.post(CHAT, json={}), "messages")


def test_case_10_a_template_that_refuses(make_server: Callable[..., LiveServer]) -> None:
    import msgspec

    from orcaserve.cluster.chat import ChatTemplate

    server = make_server()
    strict = "{{ raise_exception('roles must alternate') if messages[0].role != 'user' }}{{ messages[5].content.x.y }}"
    server.surface.generator.preparer._template = ChatTemplate(strict, {})
    message = refused(server.client.post(CHAT, json={"messages": [{"role": "system", "content": "x"}]}), "messages")
    assert "roles must alternate" in message
    refused(server.chat("x"), "messages")
    assert msgspec.json.decode(server.complete("SAY:x").content)["choices"][0]["text"] == "x"


def test_case_18_prompts_that_no_pool_can_hold(make_server: Callable[..., LiveServer]) -> None:
    small = make_server(num_blocks=8)  # 128 tokens, of a context of 512
    refused(small.complete([504] * 200, max_tokens=4), "prompt", code="context_length_exceeded")
    refused(small.chat("word " * 200, max_tokens=4), "messages", code="context_length_exceeded")
    assert small.complete("SAY:short").json()["choices"][0]["text"] == "short"
    ends = small.complete([504] * 100, max_tokens=300, ignore_eos=True)  # the prompt fits, the answer cannot
    assert ends.status_code == 400 or ends.json()["choices"][0]["finish_reason"] == "length" or ends.status_code == 503
    small.until_idle()


def test_lone_surrogates_are_refused(server: LiveServer) -> None:
    body = b'{"prompt": "\\ud83d", "max_tokens": 2}'
    refused(server.client.post(TEXT, content=body, headers=JSON), None)


def test_several_prompts_are_numbered_in_order(server: LiveServer) -> None:
    answer = server.complete(["SAY:one", "SAY:two", "SAY:three"], n=2, max_tokens=5).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        *[(0, "one"), (1, "1 one"), (2, "two"), (3, "1 two"), (4, "three"), (5, "1 three")]
    ]


def test_continuing_the_final_message(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "SAY:Hello  "}]
    body = {"messages": messages, "continue_final_message": True}
    ids = server.client.post("/tokenize", json=body).json()["tokens"]
    text = server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nSAY:Hello  ")
    refused(server.client.post(CHAT, json=body | {"add_generation_prompt": True}), "continue_final_message")
    refused(server.client.post(CHAT, json=body | {"messages": messages[:1]}), "messages[0].role")
    refused(server.client.post(CHAT, json=body | {"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs")


def test_tokenize_and_back(server: LiveServer) -> None:
    answer = server.client.post("/tokenize", json={"prompt": "héllo 🧪", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héllo 🧪"}
    refused(server.client.post("/tokenize", json={}), "prompt")
    refused(
        server.client.post("/tokenize", json={"prompt": "x", "messages": [{"role": "user", "content": "x"}]}), "prompt"
    )
    refused(server.client.post("/detokenize", json={"tokens": [49_152]}), "tokens")


def test_truncated_prompts_keep_their_end(server: LiveServer) -> None:
    answer = server.complete("many words before " * 100 + "SAY:end", truncate_prompt_tokens=4).json()
    assert answer["usage"]["prompt_tokens"] == 4

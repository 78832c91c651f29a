"""The cases of faults.jsonl about bad requests: each gets a 4xx that names its field, and harms nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import MAX_MODEL_LEN
from tests.cluster.live import LiveServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _neighbour(server: LiveServer) -> Iterator[None]:
    """A good stream runs beside every bad request, and must not notice."""
    texts: list[str] = []

    def stream() -> None:
        texts.extend(server.events(TEXT, {"prompt": "SAY:a quiet neighbour", "max_tokens": 30}))

    thread = threading.Thread(target=stream)
    thread.start()
    yield
    thread.join(30)
    assert "".join(json.loads(t)["choices"][0]["text"] for t in texts[:-1]) == "a quiet neighbour"
    assert server.client.get("/health").status_code == 200
    server.until_idle()


def refused(response: httpx.Response, param: str | None, status: int = 400, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


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


@pytest.mark.parametrize("value", [1_000_000, -1, 21, True, 1.5, "2"])
def test_case_08_top_logprobs(server: LiveServer, value: Any) -> None:
    refused(server.chat("hi", max_tokens=1, logprobs=True, top_logprobs=value), "top_logprobs")


def test_case_08_logprobs_of_the_wrong_kind(server: LiveServer) -> None:
    refused(server.chat("hi", top_logprobs=2), "top_logprobs")
    refused(server.chat("hi", logprobs=3), "logprobs")
    refused(server.complete("hi", logprobs=1_000_000), "logprobs")
    refused(server.complete("hi", logprobs=True), "logprobs")
    refused(server.complete("hi", prompt_logprobs=21), "prompt_logprobs")


def test_case_08_no_infinity_in_json(server: LiveServer) -> None:
    response = server.chat("SAY:x", logprobs=True, top_logprobs=20)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert len(entries[0]["top_logprobs"]) == 20
    assert entries[-1]["logprob"] == -9999.0  # the parrot gives the end token minus infinity
    assert not any(word in response.text for word in ("Infinity", "NaN"))


@pytest.mark.parametrize(
    "bias", [{"999999999": 5}, {"-1": 1}, {"abc": 1}, {"5": 1000}, {"5": "x"}, {"49152": 1}, {"٣": 1}, []]
)
def test_case_09_logit_bias(server: LiveServer, bias: Any) -> None:
    refused(server.chat("hi", max_tokens=4, logit_bias=bias), "logit_bias")
    assert server.chat("SAY:hi", logit_bias={"5": 100, "49151": -100}).status_code == 200


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-1, 3, "NaN", "x", True, 1e999)],
        *[("top_p", v) for v in (-0.1, 1.1, "x")],
        *[("top_k", v) for v in (-2, 1.5, "x", True)],
        *[("min_p", v) for v in (-0.1, 1.1)],
        *[("presence_penalty", v) for v in (-3, 3)],
        *[("frequency_penalty", v) for v in (-3, 3)],
        *[("repetition_penalty", v) for v in (0, -1, 100)],
        *[("min_tokens", v) for v in (-1, 600)],
        *[("stop", v) for v in ("", [""], [1], {}, [*"abcdefghijklmnopq"], "x" * 2000)],
        *[("stop_token_ids", v) for v in ([-1], [49152], ["x"], 5)],
        *[("allowed_token_ids", v) for v in ([], [49152])],
        *[("bad_words", v) for v in ("x", [""], [1], ["x" * 300], [*map(str, range(200))])],
        *[("priority", v) for v in ("x", 2**40)],
        *[("deadline_ms", v) for v in (0, -1, "x")],
        *[("truncate_prompt_tokens", v) for v in (0, -1)],
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 1),
        ("stream", "true"),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("guided_json", {}),
        ("best_of", 0),
    ],
)
def test_case_12_parameters_out_of_range(server: LiveServer, field: str, value: Any) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 4, field: value})
    refused(server.client.post(TEXT, content=body, headers=JSON), None if "Infinity" in body else field)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": t} for t in (0, 1e-9, 1e-4, 2)]
    + [{"top_p": p} for p in (1e-9, 0, 1)]
    + [{"min_p": 1}, {"top_k": 1}, {"top_k": 10_000_000}, {"top_k": -1}, {"stop": []}, {"seed": None}, {"stop": None}],
)
def test_case_12_parameters_at_the_edge(server: LiveServer, fields: dict[str, Any]) -> None:
    assert server.complete("SAY:fine", **fields).json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, "1", 1.5, True])
def test_case_13_bad_seeds(server: LiveServer, seed: Any) -> None:
    refused(server.complete("x", seed=seed), "seed")


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_case_13_good_seeds(server: LiveServer, seed: int) -> None:
    assert server.complete("SAY:x", seed=seed, n=2).status_code == 200


@pytest.mark.parametrize("salt", ["", 7, ["a"]])
def test_case_14_bad_salts(server: LiveServer, salt: Any) -> None:
    refused(server.complete("x", cache_salt=salt), "cache_salt")


def test_case_14_hits_stay_within_a_salt(server: LiveServer) -> None:
    def cached(salt: str) -> int:
        usage = server.complete("a long prompt " * 30, max_tokens=1, cache_salt=salt).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"$ref": "#/nope"}}}}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema"},
        {"type": "bogus"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "x" * 70_000}}},
        {},
        "json",
    ],
)
def test_case_22_response_format(server: LiveServer, wanted: Any) -> None:
    refused(server.chat("hi", response_format=wanted), "response_format")


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "("},
        {"grammar": "root ::= nowhere"},
        {"json": "{not json"},
        {"json": "[]"},
        {"json": {"type": "objekt"}},
        {"choice": []},
        {"choice": [1]},
        {"regex": "a", "choice": ["b"]},
        {},
    ],
)
def test_case_22_structured_outputs(server: LiveServer, wanted: Any) -> None:
    refused(server.complete("hi", structured_outputs=wanted), "structured_outputs")


def test_case_22_deep_schemas(server: LiveServer) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert "deeper than 32" in refused(server.chat("hi", response_format=wanted), "response_format")


def test_case_22_good_ones_pass(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer"}}, "required": ["not"]}
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    ):
        assert server.chat("SAY:x", **fields).status_code == 200


def test_case_18_prompts_that_no_pool_can_hold(make_server: Callable[..., LiveServer]) -> None:
    small = make_server(num_blocks=8)  # 128 tokens, of a context of 512
    refused(small.complete([504] * 200, max_tokens=4), "prompt", code="context_length_exceeded")
    refused(small.chat("word " * 200, max_tokens=4), "messages", code="context_length_exceeded")
    assert small.complete("SAY:short").json()["choices"][0]["text"] == "short"
    ends = small.complete([504] * 100, max_tokens=300, ignore_eos=True)  # the prompt fits, the answer cannot
    assert ends.status_code == 400 or ends.json()["choices"][0]["finish_reason"] == "length" or ends.status_code == 503
    small.until_idle()


@pytest.mark.parametrize("n", [5_000_000, 0, -1, 1.5, "2", True])
def test_case_38_n(server: LiveServer, n: Any) -> None:
    refused(server.complete("hi", max_tokens=1, n=n), "n")
    refused(server.chat("hi", max_tokens=1, n=n), "n")


def test_case_38_many_prompts_and_unknown_ids(server: LiveServer) -> None:
    refused(server.complete("hi", max_tokens=1, best_of=1_000_000), "best_of")
    refused(server.complete("hi", n=3, best_of=2), "best_of")
    refused(server.complete(["x"] * 100_000, n=100, max_tokens=1), "prompt")
    refused(server.complete(["x"] * 10, n=100, max_tokens=1), "n")
    refused(server.complete([999_999_999], max_tokens=1), "prompt")
    refused(server.complete([49_152], max_tokens=1), "prompt")
    refused(server.complete([-1], max_tokens=1), "prompt")
    refused(server.complete([504, "x"], max_tokens=1), "prompt")
    refused(server.complete(["x", 504], max_tokens=1), "prompt")
    refused(server.complete([True], max_tokens=1), "prompt")
    refused(server.complete(["\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"), 1]), "prompt")
    answer = server.complete("SAY:two", n=2, max_tokens=5).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == server.complete("SAY:two").json()["usage"]["prompt_tokens"]


def test_lone_surrogates_are_refused(server: LiveServer) -> None:
    body = b'{"prompt": "\\ud83d", "max_tokens": 2}'
    refused(server.client.post(TEXT, content=body, headers=JSON), None)


def test_several_prompts_are_numbered_in_order(server: LiveServer) -> None:
    answer = server.complete(["SAY:one", "SAY:two", "SAY:three"], n=2, max_tokens=5).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        *[(0, "one"), (1, "1 one"), (2, "two"), (3, "1 two"), (4, "three"), (5, "1 three")]
    ]


def test_best_of_returns_the_likeliest(server: LiveServer) -> None:
    answer = server.complete("SAY:one", best_of=3, n=1, max_tokens=2).json()
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 6
    refused(server.complete("x", best_of=2, n=1, stream=True), "best_of")


def test_unknown_fields_are_named_in_a_header(server: LiveServer) -> None:
    response = server.chat("SAY:x", frobnicate=1, metadata={"a": "b"}, **{"bad\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-orcaserve-ignored-fields"] == "frobnicate, metadata, bad??name"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("prediction", {"type": "content"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: LiveServer, field: str, value: Any) -> None:
    assert field in refused(server.chat("x", **{field: value}), field)


def test_fields_that_ask_for_nothing_pass(server: LiveServer) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "suffix": None,
        "audio": None,
        "store": False,
    }
    response = server.chat("SAY:x", **nothing)
    assert response.status_code == 200


@pytest.mark.parametrize("role", ["tool", "function"])
def test_tool_turns_are_refused(server: LiveServer, role: str) -> None:
    body = {"messages": [{"role": role, "content": "x"}]}
    refused(server.client.post(CHAT, json=body), "messages[0].role")


def test_unknown_models(server: LiveServer) -> None:
    response = server.chat("x", model="nope")
    refused(response, "model", 404, "model_not_found")
    assert server.client.get("/v1/models/nope").status_code == 404
    assert server.client.get(f"/v1/models/{server.model.name}").json()["id"] == server.model.name


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

"""The cases of faults.jsonl about streams, against a live server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.live import LiveServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def text_of(path: str, events: list[str]) -> str:
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path == TEXT:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


def finish_of(events: list[str]) -> list[str]:
    choices = [c for event in events[:-1] for c in json.loads(event)["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def both(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """Streamed text, the stream's events, and the whole answer's choice; they must agree."""
    events = server.events(path, body)
    assert events[-1] == "[DONE]"
    answer = server.client.post(path, json=body).json()
    choice = answer["choices"][0]
    whole = choice["text"] if path == TEXT else choice["message"]["content"]
    streamed = text_of(path, events)
    assert streamed == whole
    assert finish_of(events) == [choice["finish_reason"]]
    return streamed, events, choice


@pytest.mark.parametrize(
    ("stop", "want", "finish"),
    [
        (["six seven eight"], " one two three four five ", "stop"),
        (["six seven nine"], " one two three four five six seven eight nine ten eleven twelve", "stop"),
        (["four", "two three four"], " one ", "stop"),
        (["eleven twelve"], " one two three four five six seven eight nine ten ", "stop"),
        (["twelve thirteen"], " one two three four five six seven eight nine ten eleven twelve", "stop"),
    ],
)
def test_case_01_stop_strings_over_several_tokens(server: LiveServer, stop: list[str], want: str, finish: str) -> None:
    body = {"prompt": "Count in words:", "temperature": 0, "max_tokens": 40, "stop": stop}
    streamed, events, choice = both(server, TEXT, body)
    assert streamed == want
    assert choice["finish_reason"] == finish
    pieces = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    for one in stop:
        if one in "six seven eight":
            assert not any("six" in piece for piece in pieces)
    server.until_idle()


def test_case_01_the_stop_string_can_be_asked_for(server: LiveServer) -> None:
    body = {"prompt": "Count:", "max_tokens": 40, "stop": ["two three"], "include_stop_str_in_output": True}
    streamed, _, choice = both(server, TEXT, body)
    assert streamed == " one two three"
    assert choice["stop_reason"] == "two three"


def test_case_01_text_held_back_is_flushed_at_the_token_limit(server: LiveServer) -> None:
    body = {"prompt": "Count:", "max_tokens": 3, "stop": ["three four"]}
    streamed, _, choice = both(server, TEXT, body)
    assert streamed == " one two three"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["🧪🦊 日本語", "ďábel á", "a  b   c", "tab\tand\nline"])
def test_case_02_characters_that_span_tokens(server: LiveServer, text: str) -> None:
    streamed, events, _ = both(server, CHAT, {"messages": user(f"SAY:{text}"), "temperature": 0, "max_tokens": 60})
    assert streamed == text
    assert not any("\ufffd" in event for event in events)


def test_case_02_decoders_are_freed_when_the_client_leaves(server: LiveServer) -> None:
    body = {"prompt": "Count:", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with server.client.stream("POST", TEXT, json=body) as response:
        next(response.iter_lines())
    server.until_idle()


@pytest.mark.parametrize(
    ("options", "want"), [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_case_03_usage_only_when_asked_for(
    server: LiveServer, path: str, options: dict[str, bool] | None, want: int
) -> None:
    body: dict[str, Any] = {"messages": user("SAY:one two")} if path == CHAT else {"prompt": "SAY:one two"}
    body |= {"temperature": 0, "max_tokens": 20}
    events = server.events(path, body if options is None else body | {"stream_options": options})
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == want
    assert len({chunk["id"] for chunk in chunks}) == 1
    if want:
        assert chunks[-1] is with_usage[0]
        assert chunks[-1]["choices"] == []
        whole = server.client.post(path, json=body).json()["usage"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [chunks[-1]["usage"][name] for name in counts] == [whole[name] for name in counts]


def test_case_03_stream_options_without_stream(server: LiveServer) -> None:
    response = server.chat("x", stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_case_11_stop_string_that_is_a_special_token(server: LiveServer) -> None:
    body = {
        "prompt": "<|im_start|>user\nSAY:hi there<|im_end|>\n<|im_start|>assistant\n",
        "stop": ["<|im_end|>"],
        "ignore_eos": True,
        "max_tokens": 128,
        "temperature": 0,
    }
    streamed, _, choice = both(server, TEXT, body)
    assert streamed == "hi there"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "<|im_end|>"
    server.until_idle()


def test_case_23_counts_cover_what_was_emitted(server: LiveServer) -> None:
    answer = server.complete("SAY:a b c a b c", stop=[" c"], max_tokens=5, logprobs=2, return_token_ids=False).json()
    choice = answer["choices"][0]
    assert choice["text"] == "a b"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["a", " b"]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
def test_streams_and_whole_answers_agree_for_each_choice(server: LiveServer, path: str, n: int) -> None:
    body: dict[str, Any] = {"messages": user("SAY:alpha beta gamma")} if path == CHAT else {"prompt": "SAY:alpha beta"}
    body |= {"n": n, "temperature": 0, "max_tokens": 20, "logprobs": True if path == CHAT else 1}
    chunks = [json.loads(event) for event in server.events(path, body)[:-1]]
    whole = server.client.post(path, json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert whole["usage"]["prompt_tokens"] < 60
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            logprobs = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert logprobs == choice["logprobs"]["content"]
        else:
            assert "".join(c["text"] for c in mine) == choice["text"]
            tokens = [token for c in mine if c["logprobs"] for token in c["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]
        assert [c["finish_reason"] for c in mine][-1] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in mine[:-1])


def test_a_stop_string_ends_one_choice_and_not_the_others(server: LiveServer) -> None:
    steps = server.worker.num_steps
    answer = server.complete("Count:", n=3, stop=["1  one two three"], max_tokens=12).json()
    assert server.worker.num_steps - steps <= 16  # one prompt, and the choices side by side
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [
        " one two three four five six seven eight nine ten eleven twelve",
        "",
        "2  one two three four five six seven eight nine ten",
    ]
    server.until_idle()


def test_an_error_after_the_first_byte_is_an_event(make_server: Any) -> None:
    server: LiveServer = make_server(parrot={"pace_s": 0.02})
    body = {"prompt": "Count:", "stream": True, "max_tokens": 200, "ignore_eos": True}
    with server.client.stream("POST", TEXT, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        server.worker.fail = "the grammar cannot go on"
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "generation_failed"
    assert "the grammar cannot go on" in error["message"]
    assert not any('"finish_reason":"' in line for line in rest)
    assert "data: [DONE]" not in rest
    server.until_idle()
    assert server.complete("x").status_code == 503
    server.worker.fail = ""
    assert server.complete("SAY:x").status_code == 200

"""The cases of faults.jsonl about parameters out of their range: each gets a 4xx that names it, and harms nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.live import LiveServer
from tests.cluster.refusals import JSON, TEXT, refused

pytestmark = pytest.mark.usefixtures("neighbour")


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
    assert server.chat("SAY:hi", max_tokens=4, logit_bias={"5": 100, "49151": -100}).status_code == 200


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


def test_best_of_returns_the_likeliest(server: LiveServer) -> None:
    answer = server.complete("SAY:one", best_of=3, n=1, max_tokens=2).json()
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 6
    refused(server.complete("x", best_of=2, n=1, stream=True), "best_of")

"""Whatever comes in: no 5xx, the streams beside it do not notice, and memory stays where it is."""

from __future__ import annotations

import copy
import json
import random
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.cluster.live import LiveServer

GOOD: list[dict[str, Any]] = [
    {
        "model": "SmolLM2-135M-Instruct",
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "SAY:one"}, {"type": "text", "text": " two"}]},
            {"role": "assistant", "content": None},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["three", "four"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "seed": 7,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
    },
    {
        "prompt": ["SAY:one", "SAY:two"],
        "max_tokens": 3,
        "echo": True,
        "logprobs": 1,
        "best_of": 2,
        "stop_token_ids": [5, 6],
        "allowed_token_ids": [7, 8],
        "bad_words": ["five", "blue sky"],
        "min_tokens": 1,
        "prompt_logprobs": 1,
        "priority": 3,
        "cache_salt": "s",
        "truncate_prompt_tokens": 5,
        "deadline_ms": 1000,
        "structured_outputs": {"choice": ["a", "b"]},
    },
    {"prompt": [504, 505, 506], "max_tokens": 2, "presence_penalty": 1, "frequency_penalty": -1, "min_p": 0.1},
    {"prompt": "SAY:one two three", "max_tokens": 9, "resume_token_ids": {"0": [504]}, "stream": True},
    {"tokens": [1, 2, 3]},
]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        2**31,
        2**63,
        2**64,
        -(2**63),
        1e308,
        "",
        "x",
        "NaN",
        "\x00",
        "\ufffd",
        "🧪",
        "é" * 50,
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": ""},
        [None],
        [1, "x"],
        {"type": "text"},
        {"schema": {}},
        "<|im_end|>",
        "{{ 7 * 7 }}",
        "../" * 5,
    ),
    *([0] * 300, "a" * 3000, {"a": {"b": {"c": []}}}, [True], ["x"] * 200, float("inf"), float("nan")),
]
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A good body with a few things wrong, in its values or in its bytes."""
    body: Any = json.loads(json.dumps(rng.choice(GOOD)))
    for _ in range(rng.randint(1, 3)):
        place = body
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.5 or not isinstance(place[key], dict | list):
                if isinstance(place, dict) and rng.random() < 0.2:
                    del place[key]
                else:
                    place[key] = copy.deepcopy(rng.choice(ODD))
                break
            place = place[key]
    if isinstance(body, dict) and rng.random() < 0.7:
        body.setdefault("max_tokens", 3)
    raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.25 and raw:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
    path = rng.choice(PATHS[:2]) if rng.random() < 0.8 else rng.choice(PATHS)
    return path, bytes(raw)


@pytest.fixture(scope="module")
def paced(make_server: Callable[..., LiveServer]) -> LiveServer:
    return make_server(parrot={"pace_s": 0.005})  # else the neighbours keep a core busy


@pytest.fixture
def neighbours(paced: LiveServer) -> Iterator[None]:
    """Eight streams that run again and again; each must always say the same."""
    stop = threading.Event()
    rounds: list[int] = []
    wrong: list[str] = []

    def stream(i: int) -> None:
        want = f"stream {i} says its own words and nothing else"
        while not stop.is_set():
            events = paced.events("/v1/completions", {"prompt": f"SAY:{want}", "max_tokens": 40, "stop": ["never"]})
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            rounds.append(i)
            if text != want:
                wrong.append(text)

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    assert set(rounds) == set(range(8))
    paced.until_idle()


def throw_mutations(server: LiveServer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    bodies = [mutated(rng) for _ in range(count)]
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(4) as pool:

        def throw(path: str, body: bytes) -> int:
            response = client.post(path, content=body, headers=headers)
            assert response.status_code < 500, (path, body, response.text)
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            return response.status_code

        seen = Counter(pool.map(throw, *zip(*bodies[: count // 4], strict=True)))
        start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen.update(pool.map(throw, *zip(*bodies[count // 4 :], strict=True)))
    assert seen.total() == count
    assert seen[200] > count // 50
    assert seen[400] > count // 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib < 50 * 1024


def test_mutated_bodies(paced: LiveServer, neighbours: None) -> None:
    throw_mutations(paced, 400, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_mutated_bodies_at_length(paced: LiveServer, neighbours: None) -> None:
    throw_mutations(paced, 5000, seed=1)


def run_schemathesis(server: LiveServer, max_examples: int) -> int:
    """Cases over every operation of the document; returns how many. Only the kinds of answer are judged here."""
    document = server.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    count = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            nonlocal count
            count += 1
            response = case.call(base_url=server.url, timeout=30)
            assert response.status_code < 500, (case.path, case.body, response.text)

        check()
    return count


def test_schemathesis_finds_no_5xx(server: LiveServer) -> None:
    assert run_schemathesis(server, 15) > 60


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_schemathesis_finds_no_5xx_in_2000_cases(server: LiveServer) -> None:
    assert run_schemathesis(server, 600) >= 2000


def test_the_document_is_complete(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model_id}",
        "/tokenize",
        "/detokenize",
    } <= set(document["paths"])
    assert {"/health", "/ready", "/metrics", "/version", "/cluster"} <= set(document["paths"])
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {
        "messages",
        "temperature",
        "top_k",
        "structured_outputs",
        "resume_token_ids",
        "chat_template_kwargs",
    } <= set(chat)
    text = json.dumps(document)
    refs = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert refs <= set(document["components"]["schemas"])

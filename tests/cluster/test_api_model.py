"""The surface over the real worker and the demo model, in float32: what needs a model to be true."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orcaserve import Client
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.worker import Worker
from tests.cluster.conftest import MAX_MODEL_LEN
from tests.cluster.live import LiveServer

NUM_BLOCKS = 128


@pytest.fixture(scope="module")
def real(model: ModelInfo) -> Iterator[LiveServer]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
    worker = Worker(
        WorkerConfig(
            model_dir=model.model_dir,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_bytes=2**28,
            num_threads=1,
            grammar_compile_timeout_s=120.0,
            **limits,  # type: ignore[arg-type]
        ),
        rank=0,
        init_method="",
    )
    worker.load()
    worker.allocate(NUM_BLOCKS)
    worker.warm_up()
    worker.reset()
    with LiveServer(model, worker, num_blocks=NUM_BLOCKS, **limits) as server:
        yield server


def test_the_capital_of_germany(real: LiveServer) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of Germany?"}]
    with Client(real.url) as client:
        assert client.chat(question, temperature=0, max_tokens=20).text == "The capital of Germany is Berlin."
        assert "".join(client.stream_chat(question, temperature=0).text) == "The capital of Germany is Berlin."
    real.until_idle()


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-9}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"top_p": 0}, {"top_k": 1}, {"min_p": 1}]
)
def test_case_12_as_good_as_greedy(real: LiveServer, fields: dict[str, Any]) -> None:
    want = real.complete("The capital of France is", max_tokens=4).json()["choices"][0]["text"]
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 1.0} | fields
    assert real.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == want


def test_case_13_a_seed_gives_the_same_text_in_any_company(real: LiveServer) -> None:
    body = {"prompt": "Tell a story", "seed": 42, "temperature": 0.8, "max_tokens": 8, "ignore_eos": True, "n": 2}

    def texts() -> list[str]:
        return [choice["text"] for choice in real.client.post("/v1/completions", json=body).json()["choices"]]

    alone = texts()
    assert alone[0] != alone[1]
    others = [
        threading.Thread(target=real.complete, args=("Once",), kwargs={"temperature": 1, "max_tokens": 8})
        for _ in range(4)
    ]
    for other in others:
        other.start()
    assert texts() == alone
    for other in others:
        other.join(60)


def test_a_sampled_stream_resumes_with_the_same_noise(real: LiveServer) -> None:
    body: dict[str, Any] = {
        "prompt": "Tell a story",
        "seed": 7,
        "temperature": 1.0,
        "max_tokens": 10,
        "return_token_ids": True,
    }
    whole = real.client.post("/v1/completions", json=body).json()["choices"][0]
    rest = real.client.post("/v1/completions", json=body | {"resume_token_ids": {"0": whole["token_ids"][:4]}}).json()
    assert rest["choices"][0]["token_ids"] == whole["token_ids"][4:]
    assert whole["text"].endswith(rest["choices"][0]["text"])


def test_case_06_and_16_prompt_logprobs_survive_the_cache(real: LiveServer) -> None:
    body = {"prompt": "The sky is blue and " * 8, "max_tokens": 0, "echo": True, "logprobs": 1}
    first, second = (real.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert first["token_logprobs"][0] is None
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-4)
    assert first["tokens"] == second["tokens"]
    generated = real.complete("The sky is blue and", max_tokens=2, logprobs=1).json()["choices"][0]["logprobs"]
    assert all(value <= 0 for value in generated["token_logprobs"])


def test_case_08_a_full_list_of_logprobs(real: LiveServer) -> None:
    answer = real.chat("hi", logprobs=True, top_logprobs=20, max_tokens=2).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 20


def test_output_follows_a_schema(real: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = real.chat("Invent a person, as JSON.", response_format=wanted, max_tokens=60).json()
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    choice = real.chat("Is water wet?", structured_outputs={"choice": ["yes", "no"]}).json()
    assert choice["choices"][0]["message"]["content"] in ("yes", "no")


def test_case_09_logit_bias_and_allowed_tokens(real: LiveServer) -> None:
    [berlin] = real.client.post("/tokenize", json={"prompt": " Berlin"}).json()["tokens"]
    answer = real.complete("The capital of France is", logit_bias={str(berlin): 100}, max_tokens=2).json()
    assert answer["choices"][0]["text"] == " Berlin Berlin"
    answer = real.complete("The capital of France is", allowed_token_ids=[berlin], max_tokens=2).json()
    assert answer["choices"][0]["text"] == " Berlin Berlin"


def test_bad_words_of_any_length_in_any_place(real: LiveServer) -> None:
    """The first word is one token with a space before it and two without; the second is several either way."""

    def answer(*words: str, **fields: Any) -> str:
        return real.complete("Paris, Paris, Paris, Paris,", bad_words=[*words], max_tokens=12, **fields).json()[
            "choices"
        ][0]["text"]

    assert answer().count("Paris") >= 4
    assert "Paris" not in answer("Paris")
    assert " Paris, Paris" not in answer("Paris, Paris")
    assert "Paris" not in answer("  Paris", temperature=1.0, seed=3)
    assert answer("Paris") == answer("Paris")  # the second time with the prompt cached
    ids = real.complete(
        "Paris, Paris, Paris, Paris,", bad_words=["Paris, Paris"], max_tokens=12, return_token_ids=True
    ).json()["choices"][0]["token_ids"]
    rest = real.complete(
        "Paris, Paris, Paris, Paris,", bad_words=["Paris, Paris"], max_tokens=12, resume_token_ids={"0": ids[:3]}
    ).json()["choices"][0]["text"]
    assert answer("Paris, Paris").endswith(rest)
    assert rest


def test_case_11_a_real_end_token_as_stop_string(real: LiveServer) -> None:
    answer = real.chat("What is the capital of Germany?", stop=["<|im_end|>"], ignore_eos=True, max_tokens=64).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
    assert answer["choices"][0]["stop_reason"] == "<|im_end|>"

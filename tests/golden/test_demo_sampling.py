"""The demo model, sampled: the same text alone, batched, resumed and with speculation; grammars end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rank_groups import RankGroup, generate, make_group, token_ids
from tokenizers import Tokenizer

from orcaserve.engine.messages import GenerateRequest, TokenDelta
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.workers.demo import pull

END = 2  # <|im_end|>
NUM_TOKENS = 10
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe"]},
    },
    "required": ["city", "population", "continent"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(pull("smollm2-135m") / "tokenizer.json"))


@pytest.fixture(scope="module")
def group() -> RankGroup:
    folder: Path = pull("smollm2-135m")
    return make_group(folder, 1, max_model_len=512, max_num_batched_tokens=512, num_speculative_tokens=3)


def request(tokenizer: Tokenizer, name: str, text: str, **changes: Any) -> GenerateRequest:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    fields = {"max_tokens": NUM_TOKENS, "seed": 7, "temperature": 0.9, "ignore_eos": True, **changes}
    return GenerateRequest(name, tuple(tokenizer.encode(chat).ids), SamplingParams(**fields))


def answer(tokenizer: Tokenizer, deltas: list[TokenDelta]) -> str:
    assert deltas[-1].finish_reason == "stop", deltas[-1]
    return tokenizer.decode([token for token in token_ids(deltas) if token != END])


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[GenerateRequest]:
    return [
        request(tokenizer, "plain", "Tell me a story about a fox."),
        request(tokenizer, "limits", "Tell me a story about a fox.", top_p=0.9, top_k=40, min_p=0.02, logprobs=2),
        request(tokenizer, "penalties", "Repeat the word tree.", repetition_penalty=1.2, frequency_penalty=0.4),
        request(tokenizer, "greedy", "Count: one two three one two three one two", temperature=0.0),
    ]


@pytest.fixture(scope="module")
def alone(group: RankGroup, requests: list[GenerateRequest]) -> dict[str, list[TokenDelta]]:
    return {each.request_id: generate(group, [each])[each.request_id] for each in requests}


def texts(found: dict[str, list[TokenDelta]]) -> dict[str, list[int]]:
    return {name: token_ids(deltas) for name, deltas in found.items()}


class TestTheSameTextHoweverItIsMade:
    def test_batched(self, group: RankGroup, requests: list[GenerateRequest], alone: dict) -> None:
        found = generate(group, requests, budget=24, arrive_every=2, max_steps_in_flight=2)
        assert texts(found) == texts(alone)

    def test_with_speculation(self, group: RankGroup, requests: list[GenerateRequest], alone: dict) -> None:
        found = generate(group, requests, num_speculative_tokens=3)
        assert texts(found) == texts(alone)
        entries = [entry for delta in found["limits"] for entry in delta.logprobs or []]
        expected = [entry for delta in alone["limits"] for entry in delta.logprobs or []]
        assert [entry.token_id for entry in entries] == token_ids(alone["limits"])
        assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)

    def test_resumed(self, group: RankGroup, requests: list[GenerateRequest], alone: dict) -> None:
        resumed = []
        for cut, each in enumerate(requests, start=3):
            had = tuple(token_ids(alone[each.request_id])[:cut])
            resumed.append(GenerateRequest(each.request_id, each.prompt_token_ids, each.sampling, output_token_ids=had))
        found = texts(generate(group, resumed))
        assert {each.request_id: [*each.output_token_ids, *found[each.request_id]] for each in resumed} == texts(alone)


class TestGrammars:
    def test_schema_regex_and_choice_beside_free_text(self, group: RankGroup, tokenizer: Tokenizer) -> None:
        """And one that does not compile, which ends alone."""
        ends = {"stop_token_ids": (END,), "ignore_eos": False, "max_tokens": 60}
        schema = Grammar("json_schema", json.dumps(SCHEMA))
        requests = [
            request(tokenizer, "schema", "Describe Berlin as JSON.", grammar=schema, temperature=0.0, **ends),
            request(tokenizer, "hot schema", "Describe Lagos as JSON.", grammar=schema, temperature=0.8, **ends),
            request(tokenizer, "regex", "A date?", grammar=Grammar("regex", r"\d{4}-\d{2}-\d{2}"), **ends),
            request(tokenizer, "choice", "Is fire hot?", grammar=Grammar("choice", '["Yes.", "No."]'), **ends),
            request(tokenizer, "broken", "Hello", grammar=Grammar("regex", "("), **ends),
            request(tokenizer, "free", "Tell me a story about a fox."),
        ]
        plain = generate(group, requests, max_steps_in_flight=2)
        for name in ("schema", "hot schema"):
            jsonschema.validate(json.loads(answer(tokenizer, plain[name])), SCHEMA)
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", answer(tokenizer, plain["regex"]))
        assert answer(tokenizer, plain["choice"]) in ("Yes.", "No.")
        assert plain["broken"][-1].finish_reason == "error"
        assert "parenthesis" in plain["broken"][-1].error
        assert token_ids(plain["free"]) == token_ids(generate(group, requests[-1:])["free"])

        fast = generate(group, requests, num_speculative_tokens=3)
        assert texts(fast) == texts(plain)


def test_prompt_logprobs_do_not_depend_on_the_chunks(group: RankGroup, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
    requests = [request(tokenizer, "scored", text, max_tokens=1, prompt_logprobs=1)]
    found = [generate(group, requests, budget=budget)["scored"][0].prompt_logprobs for budget in (512, 7)]
    for entries in found:
        assert entries is not None
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:]] == list(requests[0].prompt_token_ids[1:])
        logprobs = [entry.logprob for entry in entries[1:]]
        assert logprobs == pytest.approx([entry.logprob for entry in found[0][1:]], abs=1e-4)
        assert all(logprob <= 0 for logprob in logprobs)

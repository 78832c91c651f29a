"""KV memory on a running server: a pool of 12 blocks, two tenants, priorities, several choices.

float32 and greedy or seeded, so that a text is the same whatever happened on the way to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from orcaserve.loadtest.serving import Serving
from orcaserve.workers import demo

NUM_BLOCKS = 12
BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4  # layers, K and V, KV heads, tokens, head_dim, float32
MODEL = "SmolLM2-135M-Instruct"
PROMPTS = [list(range(1000 + 40 * i, 1032 + 40 * i)) for i in range(8)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    demo.pull("smollm2-135m")
    tenants: Path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    tenants.write_text("tenants: [{name: ann, keys: [key-of-ann]}, {name: ben, keys: [key-of-ben]}]")
    serving = Serving(
        *("--dtype", "float32", "--max-model-len", str(NUM_BLOCKS * 16)),
        *("--kv-cache-memory", str(NUM_BLOCKS * BLOCK_BYTES), "--max-num-seqs", "8"),
        *("--scheduling-policy", "priority", "--tenants-file", str(tenants)),
    )
    try:
        serving.wait_ready(240)
        yield serving
    finally:
        assert serving.stop() < 10  # what Ctrl-C promises


def client(serving: Serving, tenant: str = "ann") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key=f"key-of-{tenant}", max_retries=0)


@pytest.fixture(scope="module")
def ann(serving: Serving) -> openai.OpenAI:
    return client(serving)


def whole(who: openai.OpenAI, prompt: list[int], **extra: object) -> str:
    answer = who.completions.create(
        model=MODEL, prompt=prompt, max_tokens=64, temperature=0, extra_body={"ignore_eos": True, **extra}
    )
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


def streamed(who: openai.OpenAI, prompt: list[int]) -> str:
    chunks = who.completions.create(
        model=MODEL, prompt=prompt, max_tokens=64, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def status(who: openai.OpenAI) -> dict:
    answer: dict = who.with_options(base_url=str(who.base_url).replace("/v1/", "")).get("/cluster", cast_to=object)  # type: ignore[assignment]
    return answer


def test_requests_that_fight_for_blocks_end_with_their_solo_text(ann: openai.OpenAI) -> None:
    solo = [whole(ann, prompt) for prompt in PROMPTS]
    before = status(ann)["scheduler"]["num_preemptions"]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: whole(ann, prompt), PROMPTS)) == solo
        assert list(pool.map(lambda prompt: streamed(ann, prompt), PROMPTS)) == solo
    after = status(ann)["scheduler"]
    assert after["num_preemptions"] > before
    assert after["groups"][0]["total_blocks"] == NUM_BLOCKS
    assert after["groups"][0]["used_blocks"] == 0


def test_case_14_prefixes_are_shared_within_a_tenant_only(serving: Serving, ann: openai.OpenAI) -> None:
    prompt = list(range(5000, 5100))

    def ask(who: openai.OpenAI, salt: str | None = None) -> tuple[str, int]:
        answer = who.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body={"cache_salt": salt} if salt else {}
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].text, (details.cached_tokens or 0) if details else 0

    text, cold = ask(ann)
    assert cold == 0
    assert ask(ann) == (text, 96)
    assert ask(client(serving, "ben")) == (text, 0)
    assert ask(ann, "pepper") == (text, 0)


def test_choices_of_one_seed_differ_and_come_again(ann: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = ann.completions.create(
            model=MODEL, prompt=PROMPTS[0][:21], max_tokens=16, temperature=1.0, seed=3, n=3
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 21
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    texts = ask()
    assert len(set(texts)) == 3
    assert ask() == texts


def test_the_urgent_go_first(ann: openai.OpenAI) -> None:
    order: list[str] = []

    def run(name: str, start: int, length: int, max_tokens: int, priority: int) -> None:
        chunks = ann.completions.create(
            model=MODEL,
            prompt=list(range(start, start + length)),  # no two of them share a block
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "priority": priority},
        )
        next(iter(chunks))
        order.append(name)
        for _ in chunks:
            pass

    def wait_for(running: int, waiting: int) -> None:
        deadline_s = time.monotonic() + 60
        while (now := status(ann)["scheduler"])["running"] != running or now["waiting"] != waiting:
            assert time.monotonic() < deadline_s, now
            time.sleep(0.01)

    with ThreadPoolExecutor(3) as pool:  # 3 blocks and more; then 10 each: no two of the three fit together
        runs = [pool.submit(run, "first", 7000, 40, 152, 0)]
        wait_for(1, 0)
        runs.append(pool.submit(run, "patient", 9000, 150, 8, 5))
        wait_for(1, 1)
        runs.append(pool.submit(run, "urgent", 11_000, 151, 8, 1))
        for each in runs:
            each.result(60)
    order.remove("first")  # its chunks may reach us late
    assert order == ["urgent", "patient"]


def test_case_18_what_can_never_fit_is_refused_at_once(ann: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ann.completions.create(model=MODEL, prompt=list(range(1000, 1150)), max_tokens=100)
    assert refused.value.code == "context_length_exceeded"
    assert "192" in refused.value.message

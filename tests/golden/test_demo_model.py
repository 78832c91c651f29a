"""The demo model answers as transformers does, token for token, in float32 (expected.json, by make_expected.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_groups import RankGroup, generate, greedy, make_group, token_ids

from orcaserve.workers.demo import pull

EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text())
REQUESTS = [greedy(str(i), case["prompt"], len(case["output"])) for i, case in enumerate(EXPECTED)]
BUDGETS = (16, 64, 512)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return pull("smollm2-135m")


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"tp{size}")
def group(request: pytest.FixtureRequest, model_dir: Path) -> RankGroup:
    """9 heads over 3 KV heads: 2 ranks take 2 + 1 groups, 3 ranks take one each."""
    return make_group(model_dir, request.param, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=32)


def assert_expected(found: dict) -> None:
    wrong = [i for i, case in enumerate(EXPECTED) if str(i) in found and token_ids(found[str(i)]) != case["output"]]
    assert wrong == []


def test_alone(group: RankGroup) -> None:
    """One after the other, each with the next chunk budget."""
    for i, request in enumerate(REQUESTS):
        assert_expected(generate(group, [request], budget=BUDGETS[i % 3]))


@pytest.mark.parametrize("budget", BUDGETS)
def test_batched_with_different_arrival_times(group: RankGroup, budget: int) -> None:
    assert_expected(generate(group, REQUESTS, budget=budget, arrive_every=1))


def test_planned_ahead_with_speculation(group: RankGroup) -> None:
    """Two plans in flight; then drafts that are verified: the same ids."""
    assert_expected(generate(group, REQUESTS, budget=64, max_steps_in_flight=2))
    assert_expected(generate(group, REQUESTS, budget=64, num_speculative_tokens=4))

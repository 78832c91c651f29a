"""The demo model answers as transformers does, token for token, in float32 (expected.json, by make_expected.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_groups import RankGroup, generate, greedy, make_group, token_ids

from orcaserve.workers.demo import pull

EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text())
REQUESTS = [greedy(str(i), case["prompt"], len(case["output"])) for i, case in enumerate(EXPECTED)]
NUM_ALONE = 8  # tokens of several ranks: alone is slow, and the batch has all of them
BUDGETS = (16, 64, 512)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return pull("smollm2-135m")


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"tp{size}")
def group(request: pytest.FixtureRequest, model_dir: Path) -> RankGroup:
    """9 heads over 3 KV heads: 2 ranks take 2 + 1 groups, 3 ranks take one each."""
    return make_group(model_dir, request.param, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=32)


def assert_expected(found: dict) -> None:
    assert {name: token_ids(deltas) for name, deltas in found.items()} == {
        str(i): case["output"] for i, case in enumerate(EXPECTED)
    }


def test_alone(group: RankGroup) -> None:
    """One after the other, each with the next chunk budget."""
    for i, case in enumerate(EXPECTED):
        expected = case["output"] if group.config.tensor_parallel_size == 1 else case["output"][:NUM_ALONE]
        found = generate(group, [greedy("a", case["prompt"], len(expected))], budget=BUDGETS[i % 3])
        assert token_ids(found["a"]) == expected, f"prompt {i}"


@pytest.mark.parametrize("budget", BUDGETS)
def test_batched_with_different_arrival_times(group: RankGroup, budget: int) -> None:
    assert_expected(generate(group, REQUESTS, budget=budget, arrive_every=1))


@pytest.mark.parametrize("options", [{"max_steps_in_flight": 2}, {"num_speculative_tokens": 4}], ids=str)
def test_plans_in_flight_and_speculation(model_dir: Path, options: dict[str, int]) -> None:
    """Two plans sent before the first one's result is known; drafts that a step verifies: the same ids."""
    group = make_group(
        model_dir, 2, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=32, num_speculative_tokens=4
    )
    assert_expected(generate(group, REQUESTS, budget=64, arrive_every=1, **options))

"""The four-row study: static batching pads and waits, continuous batching does neither, tokens are the same."""

import numpy as np
import pytest

from orcaserve.loadtest import study
from orcaserve.loadtest.model_shape import LLAMA_3_70B
from orcaserve.loadtest.step_time import H100, calibrate
from orcaserve.loadtest.study import StudyRow, StudySpec
from orcaserve.loadtest.table import Measured, write_report

SPEC = StudySpec(users=50, num_requests=150)


@pytest.fixture(scope="module")
def rows() -> dict[str, StudyRow]:
    return {row.variant.name: row for row in study.simulated(LLAMA_3_70B, H100, 4, SPEC)}


def test_all_rows_answer_all_requests_with_the_same_tokens(rows) -> None:
    wanted = sum(r.output_tokens for r in study.requests(SPEC))
    for row in rows.values():
        assert row.figures.finished == SPEC.num_requests
        assert row.figures.output_tokens == wanted


def test_only_static_batching_pads(rows) -> None:
    prompts = sum(r.prompt_tokens for r in study.requests(SPEC))
    for name, row in rows.items():
        steps = row.steps
        assert sum(steps.prefill_tokens) == prompts
        assert (sum(steps.padding_tokens) > 0.3 * prompts) == name.startswith("static")
        assert min(*steps.prefill_tokens, *steps.decode_tokens, *steps.padding_tokens) >= 0


def test_padding_of_a_batch_is_what_its_longest_members_say() -> None:
    """Three requests in one batch, worked out by hand."""
    spec = StudySpec(users=3, num_requests=3, lengths="fixed:1,1", max_num_seqs=4, chunk_budget=4096)
    variant = study.Variant("static", True, True, 3)
    load = [study.LoadRequest(0, 10, 8), study.LoadRequest(1, 50, 20), study.LoadRequest(2, 25, 5)]
    step_time = study.StepTime(LLAMA_3_70B, H100, 4)
    row = study.run_variant(variant, spec, 1000, study.VirtualWorkers(step_time, 4), load)
    filler = (50 - 10) + (50 - 25)
    dropped = (20 - 8) + (20 - 5)
    assert sum(row.steps.padding_tokens) == filler + dropped
    assert row.figures.padding_share == pytest.approx((filler + dropped) / (3 * (50 + 19)))


def test_continuous_batching_wins_where_it_should(rows) -> None:
    static, large, whole, chunked = (rows[v.name].figures for v in study.VARIANTS)
    assert static.output_throughput < large.output_throughput < whole.output_throughput
    assert chunked.output_throughput > 3 * static.output_throughput
    assert chunked.queue_ms["p99"] < static.queue_ms["p99"] / 5
    assert chunked.ttft_ms["mean"] < static.ttft_ms["mean"] / 10
    assert chunked.itl_p99_ms < whole.itl_p99_ms  # what chunking is for
    assert np.max(rows["continuous + chunked prefill"].steps.prefill_tokens) <= SPEC.chunk_budget


def test_tables_name_every_row(rows) -> None:
    table = study.as_table(list(rows.values()))
    assert [line[0] for line in table[1:]] == [v.name for v in study.VARIANTS]
    assert table[1][-1] == "1.00x"
    assert set(study.as_dict(list(rows.values()))) == set(rows)


def test_the_measured_report_has_the_model_beside_it(rows, tmp_path) -> None:
    """Rows that the model itself made: every ratio is 1."""
    device = calibrate(LLAMA_3_70B, H100, 4, rows["continuous + chunked prefill"].steps)
    found = Measured(list(rows.values()), list(rows.values()), LLAMA_3_70B, device, dict.fromkeys(rows, 0.0))
    page = write_report(found, tmp_path, "measured").read_text()
    assert "The calibrated step-time model" in page
    assert page.count("1.00x") >= 3 * len(rows)
    assert len(list(tmp_path.glob("*.png"))) == 1 + 2 * len(rows)
    assert page.count("data:image/png") == 1 + 2 * len(rows)

